"""``--redact``: people and addresses have one pseudonym each, in texts, calls, results and tokens."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emailrl.page.build import gather, page
from emailrl.page.place import place_of
from emailrl.page.redact import Redactor, redacted
from emailrl.records import write_records, write_trajectories
from emailrl.records.trajectory import Message, Scenario, Trajectory


def learned(*texts: str) -> Redactor:
    redactor = Redactor()
    redactor.learn(list(texts))
    return redactor


def test_a_name_has_one_pseudonym_in_addresses_and_in_texts() -> None:
    redactor = learned("ann.lee@acme.com", "lee@other.org")
    shown = redactor.record("Lee (LEE, ann.lee@acme.com) wrote to lee@other.org")
    assert shown == "Name2 (Name2, name1.name2@org1.example) wrote to name2@org2.example"
    web = learned("https://x.com/click/market?who=ann@x.com")
    assert web.record("click, market, ann") == "click, market, Name1"
    assert redactor.record({"to": ["Annex", "Ann's"]}) == {"to": ["Annex", "Name1's"]}


def test_display_names_have_pseudonyms_in_hits_and_in_texts() -> None:
    redactor = learned('[{"message_id":"m1","from":"Jürgen Müller","date":"2026-05-01","snippet":"x"}]')
    redactor.learn_names(["Łukasz Żak", "Roe, Sam"])
    shown = redactor.record('{"from":"Jürgen Müller","body":"Müller, Łukasz Żak and Sam Roe met Lee"}')
    assert json.loads(shown) == {"from": "Name1 Name2", "body": "Name2, Name3 Name4 and Name6 Name5 met Lee"}


def test_headers_in_bodies_give_names_and_common_words_do_not() -> None:
    redactor = learned("> From: Jane Roe [mailto:jr7@x.com]\nTo: Support\n", "will.info@x.com", "don@x.com", "it will")
    shown = redactor.record("jane asked support; Will will not, Don. Don't")
    assert shown == "Name2 asked support; Name6 will not, Name8. Don't"
    # A line break inside JSON is no letter of the name after it.
    result = json.dumps({"body": "Hello,\nPemin called.\nFrom: Olga Hart\nann@x.com"})
    redactor = learned(result, "pemin@x.com")
    body = "Hello,\nName4 called.\nFrom: Name2 Name3\nname1@org1.example"
    assert json.loads(redactor.record(result)) == {"body": body}


def test_the_tokens_of_a_name_are_replaced_and_their_ids_withheld() -> None:
    redactor = learned("grogali@x.com")
    sample = {"pieces": ["Hi", " Gro", "gal", "i", ", bye", ""], "ids": [1, 2, 3, 4, 5, 6], "mask": [0] * 6}
    assert redactor.sample(sample) == {
        "pieces": ["Hi", " Name1", "", "", ", bye", ""], "ids": [1, None, None, None, 5, 6], "mask": [0] * 6
    }  # fmt: skip
    assert redactor.sample({"pieces": None, "ids": [1, 2], "mask": [0, 1]})["ids"] is None
    sample = {"pieces": ["Hi ken", "&#x40;", "x.com", " bye"], "ids": [1, 2, 3, 4], "mask": [0] * 4}
    shown = learned("ken@x.com").sample(sample)  # an address spelled otherwise
    assert (shown["pieces"], shown["ids"]) == (["Hi name1@org1.example", "", "", " bye"], [None, None, None, 4])


@pytest.mark.parametrize(
    ("text", "later", "left"),
    [
        ("From: zed quux <zq1@a.com>", "quux, zed quux and ZQ1 met", "quux|zed|zq1"),
        ("write to zed quux <zq1@a.com>", "zed quux met", "quux|zed"),
        ("ken@enron.com", "ken said he would call", "ken"),
        ("klay42@x.com", "klay42, Klay", "klay|42"),
        *(
            (f"ken{at}enron.com", "ken", "ken|enron")
            for at in ("&#x40;", "&#64;", "&commat;", "＠", "=40", r"\u0040", "@@")
        ),
        ("k\u200ben\u200b@en\u200bron.com", "Ken", "k.?en|en.?ron"),
        (r'"ken\ lay"@enron.com', "ken", "ken|lay|enron"),
        (r"ken\ lay@enron.com", "ken", "ken|lay|enron"),
        ("ken@lay@enron.com", "lay", "ken|lay|enron"),
        ("to /O=ENRON/OU=NA/CN=KLAY", "klay", "klay|enron"),
        ("From: 李明 <lm@x.com>", "李明说", "李|明"),
    ],
)
def test_no_spelling_of_an_address_or_name_is_left(text: str, later: str, left: str) -> None:
    redactor = learned(text, later)
    assert not re.search(left, redactor.record(f"{text}\n{later}"), re.IGNORECASE)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"C:\Users\Zed Quux\a.txt, then", "C:…/a.txt, then"),
        (r'<call>"C:\\Users\\zed\\a.txt\nDear', r'<call>"C:…/a.txt\nDear'),
        ("C:/Users/zed/a.txt and D:/Users/zed", "C:…/a.txt and D:…/"),
        ("see:/home/zed/a", "see:…/a"),
        ("</home/zed/a></b>", "<…/a></b>"),
        ("smb://srv/zed/a", "smb:…/a"),
        (r"\\srv\zed\a", "…/a"),
        ("/home/zed/a and b/c or /home/zed/My Runs/d", "…/a and b/c or …/d"),
        ("https://x.com/a/b", "https://x.com/a/b"),
    ],
)
def test_paths_are_cut_and_the_text_between_them_stays(text: str, shown: str) -> None:
    assert learned().record(text) == shown


def test_no_name_and_no_address_is_left_in_a_page(trajectory: Trajectory, tmp_path: Path) -> None:
    mail = {
        "message_id": "<m1@x>", "from_address": "olga.hartwig@secret.example", "to_addresses": ["bob@example.com"],
        "subject": "Hartwig", "body": "Hi Bob,\nHartwig paid.\nOlga", "cc_addresses": ["body@example.com"],
    }  # fmt: skip
    messages = [*trajectory.messages, Message("tool", json.dumps(mail), name="read_email")]
    scenario = replace(trajectory.scenario, question="Did Olga Hartwig pay Bob?")
    file = tmp_path / "mail.jsonl"
    write_trajectories(file, [replace(trajectory, messages=messages, scenario=scenario, final_answer="Olga H.")])
    data = redacted(gather(place_of(file), model_name="nano"))
    everything = json.dumps([data.run, data.rows, list(data.details())]).lower()
    assert not any(name in everything for name in ("olga", "hartwig", "bob@", "secret.example", "m1@x"))
    assert data.rows[0]["cited"] and page(data)
    [detail] = data.details()
    gold, cited = detail["evidence"]["gold"][0]["id"], detail["conversation"][4]["calls"][0]["arguments"]["sources"]
    assert cited == [gold]  # one pseudonym each: what was cited is still seen to be the gold email
    [shown] = [item["text"] for item in detail["conversation"] if item.get("name") == "read_email"]
    assert set(json.loads(shown)) == set(mail)  # an address at body@ does not rename the field


def test_one_long_word_takes_no_quadratic_time() -> None:
    """A megabyte without a space would take an hour if every letter could begin an address of any length."""
    for text in ("q", "a@", "@", "\\", "/", "~", "/O=a", "C:", "A:\\b ", "&#0", "1"):
        redactor = learned(text * 30_000, "ann@acme.com")
        assert redactor.record("ann@acme.com").endswith(".example") and redactor.record(text * 30_000)


def test_what_a_bad_line_holds_is_not_quoted(trajectory: Trajectory, tmp_path: Path) -> None:
    file = tmp_path / "run" / "trajectories" / "step-000001.jsonl"
    write_trajectories(file, [trajectory])
    bad = json.dumps(json.loads(file.read_text()) | {"final_sources": "Zoe Quill"})
    file.write_text(f"{file.read_text()}{bad}\n")
    write_records(tmp_path / "run" / "training" / file.name, [{"id": "t-7", "dropped": ["Zoe Quill"], "Zoe": 1}])
    write_records(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "loss": "Zoe Quill"}])
    data = gather(place_of(tmp_path / "run"), model_name="nano")
    assert all('"Zoe Quill"' in each for each in data.run["left_out"][:2])
    assert redacted(data).run["left_out"] == [
        "metrics.jsonl, line 1: not a metrics record",
        "step-000001.jsonl: 1 of 2 lines could not be read",
        "training/step-000001.jsonl, line 1: not a training note",
    ]


# -- any mailbox

NAMES = st.text("abdeknoruvxyzäß", min_size=1, max_size=9)
LOCALS = st.one_of(
    st.builds("{}.{}".format, NAMES, NAMES),
    st.builds('"{} {}"'.format, NAMES, NAMES),
    st.from_regex(r"[a-z0-9]{1,3}|[a-z]{1,4}[0-9_+'-][a-z0-9]{1,4}|[a-z]{65,80}|info|may", fullmatch=True),
)
DOMAINS = st.sampled_from(["corvane.test", "[10.9.8.7]", "x.corvane.test", "CORVANE", "möwe.test"])
PEOPLE = st.lists(st.tuples(NAMES, NAMES, LOCALS, st.sampled_from(["@", "%40"]), DOMAINS), min_size=1, max_size=4)
FOLDERS = st.builds("/home/{}{}".format, NAMES, st.sampled_from(["", "/mail", "/My Runs", "/a/b"]))
IN_TEXT = st.sampled_from(["{}", "Ask {}.", "<{}>", "mailto:{}?subject=x", "to={}&x=1", "{},x", "({})", '["{}"]'])
CASES = st.sampled_from([str.lower, str.upper, str])


@settings(max_examples=60, deadline=None)
@given(PEOPLE, FOLDERS, IN_TEXT, CASES)
def test_no_address_full_name_or_home_is_left(
    people: Any, folder: str, in_text: str, case: Callable[[str], str]
) -> None:
    addresses = ["".join(address) for _, _, *address in people]
    names = [f"{first.title()} {last.title()}" for first, last, *_ in people]
    lines = [in_text.format(address) for address in addresses]
    lines += [f"From: {name} <{address}>" for name, address in zip(names, addresses, strict=True)]
    body = "\n".join([*lines, *(f"then {case(name)} said" for name in names)])
    mail = {"message_id": "<1@x>", "subject": lines[0], "body": body, "to_addresses": addresses}
    messages = [Message("tool", json.dumps(mail), name="read_email"), Message("assistant", body)]
    failed = f"FileNotFoundError: {folder + '/run.jsonl'!r}, in {folder}/run.jsonl and {folder}"
    scenario = Scenario("q", lines[0], names[0], ["<1@x>"], addresses[0], "2001-01-01")
    with tempfile.TemporaryDirectory() as root:
        file = Path(root) / f"{names[0]}.jsonl"
        write_trajectories(file, [Trajectory("t", "g", scenario, messages=messages, exception=failed)])
        found = redacted(gather(place_of(file), model_name="nano"))
        document = page(found), strings([found.run, found.rows, list(found.details())])
    assert names[0] not in document[0]
    for each in [*addresses, *names, folder]:
        assert not re.search(rf"(?<![\w.]){re.escape(each)}(?!\w)", document[1], re.IGNORECASE), each


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("To: Lay, Ken; Quux, Zoe;\n\tBlatt, Mara", "Mara Blatt"),
        ("To: " + "Quux, Zoe; " * 60 + "Blatt, Mara", "Mara Blatt"),
        ("From: Ren\u00e9e Dubois", "Rene\u0301e Dubois"),
        ("From: Rene\u0301e Dubois", "Ren\u00e9e Dubois"),
        ("From: राम शर्मा", "राम शर्मा"),
        ("From: José Muñiz", "Jose MUNIZ"),
        ("From: Strauß Wirth", "STRAUSS wirth"),
        ("From: İlker IŞIK", "ilker ışık"),
    ],
)
def test_names_of_long_and_composed_headers_are_replaced(header: str, name: str) -> None:
    redactor = Redactor()
    redactor.learn(header)
    left = redactor.record(f"{name} called, then {name.split()[0]}.")
    assert not set(name.split()) & set(re.findall(r"[^ ,.]+", left))


def strings(value: Any) -> str:
    """All texts of a value, those in JSON too, one per line."""
    if isinstance(value, dict | list):
        return "\n".join(map(strings, value if isinstance(value, list) else [*value, *value.values()]))
    text = str(value)
    return f"{text}\n{strings(json.loads(text))}" if text.startswith('{"') else text
