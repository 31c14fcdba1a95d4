"""Address headers as programs write them: who is addressed, whatever stands around."""

from __future__ import annotations

import pytest
from hang import must_end

from emailrl.mail.sources.headers import addresses_of


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ann@x.org <bob@x.org>", ["bob@x.org"]),
        ("'ann@x.org' <bob@x.org>", ["bob@x.org"]),
        ("Smith, John <john@x.org>", ["john@x.org"]),
        ("ann@x.org, Smith, John <john@x.org>, cy@x.org", ["ann@x.org", "john@x.org", "cy@x.org"]),
        ("Ann … via List <list@x.org>", ["list@x.org"]),
        ('"Smith, John" <John@X.org>', ["john@x.org"]),
        ("Ann@Home <ann@x.org>, bob@x.org", ["ann@x.org", "bob@x.org"]),
        ("Big Bug bug@x.org", ["bug@x.org"]),
        ("ann@x.org bob@x.org", ["ann@x.org", "bob@x.org"]),
        ("ann@x.org; Bob <bob@x.org>", ["ann@x.org", "bob@x.org"]),
        ("<ann@x.org> <bob@x.org>", ["ann@x.org", "bob@x.org"]),
        ("<ann@x.org, bob@x.org>", ["ann@x.org", "bob@x.org"]),
        ("<<<ann@x.org>>>", ["ann@x.org"]),
        ("Ann <ann@x.org", ["ann@x.org"]),
        ('"Ann <ann@x.org>, Bob <bob@x.org>', ["ann@x.org", "bob@x.org"]),
        ('"ann@x.org"', ["ann@x.org"]),
        ("ann(her (own) place)@x.(a host)org (Ann)", ["ann@x.org"]),
        ("(Ann <ann@x.org>", ["ann@x.org"]),
        ("Ann) <ann@x.org>", ["ann@x.org"]),
        ("Ann (a \\) sign) <ann@x.org>", ["ann@x.org"]),
        ("ann @ x . org", ["ann@x.org"]),
        ("<@relay.org,@other.org:ann@x.org>", ["ann@x.org"]),
        ("<mailto:ann@x.org>, mailto:bob@x.org", ["ann@x.org", "bob@x.org"]),
        ("Team: Ann <ann@x.org>, bob@x.org; , cy@x.org", ["ann@x.org", "bob@x.org", "cy@x.org"]),
        ("'al@x.org' <'al@x.org'>", ["al@x.org"]),
        ("'al@x.org', bob@x.org.", ["al@x.org", "bob@x.org"]),
        ("al@x.org.", ["al@x.org"]),
        ("Al <al@x.org.>", ["al@x.org"]),
        ("Bob [mailto:bob@x.org]", ["bob@x.org"]),
        ("Lee, Ann al@x.org", ["al@x.org"]),
        ("o'neil@x.org, 'al.x@x.org", ["o'neil@x.org", "'al.x@x.org"]),
        ("undisclosed-recipients:;", []),
        ("<undisclosed-recipients:@x.org;>", []),
        ('<"the.desk":@x.org>', []),
        ('<"cc:.ann"@x.org>', ['"cc:.ann"@x.org']),
        ('"ann lee"@x.org', ['"annlee"@x.org']),
        ("ann@[IPv6:2001::1], bob@x.org", ["ann@[ipv6:2001::1]", "bob@x.org"]),
        ("<daemon>, root", ["daemon", "root"]),
        ("<>, (nobody), two words, @x.org", []),
        ("=?utf-8?q?Lee=2C_Ann?= <ann@x.org>", ["ann@x.org"]),
    ],
)
def test_the_address_of_an_item(value: str, expected: list[str]) -> None:
    assert addresses_of(value) == expected


@pytest.mark.parametrize(
    "piece", ["<", "<‹", '"', '\\"', "(", "()", "[", ",", ";", ":", '"a"@', "a@b, ", "n <a@b>,", "\\"]
)
def test_time_grows_with_the_length_alone(piece: str) -> None:
    with must_end():  # measured: below 3 s
        addresses_of(piece * (1_000_000 // len(piece)))
