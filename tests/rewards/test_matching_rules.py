"""The rules of the answer check one by one: pairs of answers that differ in what the rule is about."""

from __future__ import annotations

import pytest

from emailrl.rewards.matching import match
from emailrl.rewards.matching.agreement import LONGEST, alternatives, without_framing
from emailrl.rewards.matching.kinds import with_names


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("Emily Bronte/Ellis Bell", ["Emily Bronte", "Ellis Bell"]),
        ("the pump | the valve", ["the pump", "the valve"]),
        ("Federal Power Commission (FPC)", ["Federal Power Commission", "FPC"]),
        ("a b c d e f g h / one", ["a b c d e f g h", "one"]),
        ("a b c d e f g h i / one", ["a b c d e f g h i / one"]),  # nine words are a sentence
        ("one / a b c d e f g h i", ["one / a b c d e f g h i"]),
        ("one / ", ["one /"]),
        ("http://x.org/a", ["http://x.org/a"]),
        ("5 barrels/day", ["5 barrels/day"]),
        ("$5/hour", ["$5/hour"]),
        ("$5/bbl", ["$5/bbl"]),
        ("7/seven", ["7", "seven"]),
    ],
)
def test_a_reference_with_a_stroke_has_two_answers(reference: str, parts: list[str]) -> None:
    assert alternatives(reference.strip()) == parts


@pytest.mark.parametrize(
    ("answer", "keep", "question", "rest"),
    [
        ("Sure! The red shed. Let me know if you need more.", "", "", "The red shed."),
        ("The red shed. Thanks red shed.", "red shed", "", "The red shed. Thanks red shed."),
        ("The red shed. Thanks shed.", "shed", "", "The red shed. Thanks shed."),  # four letters are kept
        ("The red shed. Thanks red.", "red", "", "The red shed."),  # three are not
        ("Where are they now? In it.", "", "Where are they now?", "In it."),
        ("Where now? In it.", "", "Where now?", "In it."),
        ("Who is it In it.", "", "Who is it", "In it."),
        ("Which? In it.", "", "Which?", "Which? In it."),  # too short to be the question again
        ("Where is In it.", "", "Where is", "Where is In it."),  # eight signs, too
    ],
)
def test_framing_is_cut_but_what_is_expected_is_kept(answer: str, keep: str, question: str, rest: str) -> None:
    assert " ".join(without_framing(answer, keep, question).split()) == rest


@pytest.mark.parametrize(
    ("answer", "reference", "named"),
    [
        ("from ada.moss@x.org", "Ada Moss", "from Ada Moss"),
        ("from ADA.MOSS@X.ORG and bo.hale@x.org", "Ada Moss", "from Ada Moss and Bo Hale"),
        ("from am7@x.org", "Ada Moss", "from am7@x.org"),  # spells no name
        ("from ada.moss@x.org", "bo@x.org", "from ada.moss@x.org"),  # an address is asked for
    ],
)
def test_an_address_stands_for_the_name_it_spells(answer: str, reference: str, named: str) -> None:
    assert with_names(answer, reference) == named


def test_an_answer_has_a_longest_length() -> None:
    assert match("When is the drill?", "May 3", "May 3" + " " * (LONGEST - 5))
    assert not match("When is the drill?", "May 3", "May 3" + " " * (LONGEST - 4))


@pytest.mark.parametrize(
    ("kind", "question", "reference", "answer", "verdict"),
    [
        ("person", "Who sent it?", "Ada Moss", "ada.moss@x.org", True),
        ("person", "Who sent it?", "Ada Moss", "bo.hale@x.org", False),
        ("text", "Which room is it?", "EB 19C1", "ada.moss@x.org", False),
        ("subject", "What is the subject?", "Pump survey in June", "The subject is Pump survey in June.", True),
        ("subject", "What is the subject?", "Pump survey in June", "Pump survey in July", False),
        ("subject", "What is the subject?", "Pump survey in June", "Survey of a pump, June", False),
        ("subject", "What is the subject?", "Pump survey", "Pump survey and boiler paint contract", False),
        ("subject", "What is the subject?", "Pump survey", "Pump survey: boiler paint", False),
        ("count", "How many mails came?", "3", "3 mails", True),
        ("count", "How many mails came?", "3", "4 mails", False),
        ("count", "How many mails came?", "3", "three", True),
        ("amount", "How much is it?", "$80", "It is 80 dollars.", True),
        ("amount", "How much is it?", "$80", "It is 80 euros.", False),
        ("date", "When was it sent?", "2001-05-03", "on May 3, 2001", True),
        ("date", "When was it sent?", "2001-05-03", "on May 4, 2001", False),
        ("person", "Who sent it?", "Ada Moss", "Moss", True),
        ("person", "Did Ada send it, or who did?", "Ada Moss", "Yes, Bo Hale did.", False),
        ("amount", "How much is it?", "$80 for the pumps", "$80", True),
        ("amount", "How much is it?", "1/4", "25%", True),
        ("date", "When did it go, and to whom?", "May 3, to Ada Moss of the pump works in Denver", "May 3", True),
        ("phone", "What is the number?", "713-555-0142", "It is (713) 555-0142.", True),
        ("phone", "What is the number?", "713-555-0142", "It is (713) 555-0143.", False),
        ("nonsense", "Who sent it?", "Ada Moss", "Ada Moss", True),
    ],
)
def test_a_kind_is_compared_as_that_kind(kind: str, question: str, reference: str, answer: str, verdict: bool) -> None:
    assert match(question, reference, answer, kind=kind) is verdict


RULES = {
    "who does what to whom": [
        ("Who replaced Ada Moss?", "Bo Hale", "Bo Hale replaced Ada Moss.", True),
        ("Who replaced Ada Moss?", "Bo Hale", "Ada Moss replaced Bo Hale.", False),
        ("Who replaced Ada Moss?", "Bo Hale", "Ada Moss was replaced by Bo Hale.", True),
        ("Who replaced Ada Moss?", "Bo Hale", "In June Ada Moss replaced Bo Hale.", False),
        ("Whom did Ada Moss replace?", "Bo Hale", "Ada Moss replaced Bo Hale.", True),
        ("Whom did Ada Moss replace?", "Bo Hale", "Bo Hale replaced Ada Moss.", False),
        ("Who approved the budget?", "Ada Moss", "It was approved by Ada Moss.", True),
        ("Who approved the budget?", "Ada Moss", "It was approved by Ned Orr, says Ada Moss.", False),
        ("Who got the letter from Ada Moss?", "Bo Hale", "Bo Hale got the letter from Ada Moss.", True),
        ("Who got the letter from Ada Moss?", "Bo Hale", "Ada Moss got the letter from Bo Hale.", False),
        ("Who got the letter from Ada Moss?", "Bo Hale", "Bo Hale got the letter from Ned Orr.", False),
        ("Who got the letter from Ada Moss?", "Bo Hale", "Ada got the letter from Bo Hale.", False),
        ("Who sold the barge to Corvane?", "Delmar", "Delmar sold it to Corvane.", True),
        ("Who sold the barge to Corvane?", "Delmar", "Corvane sold it to Delmar.", False),
        ("Who leads the survey?", "Ada Moss", "Leads = Ada Moss", True),
        ("Who leads the survey?", "Ada Moss", "Di Lund wrote that Ada Moss's deputy leads it.", False),
        ("Who leads the survey?", "Ada Moss", "Ada Moss helps, in fact Bo Hale does it.", False),
        (
            "Who leads the survey?",
            "Ada Moss",
            "Ada Moss, at age 40, was the first to lead one of the United Works.",
            True,
        ),
        ("Who chairs it if Ada is absent?", "Boris", "Boris is absent; Clara will chair it.", False),
    ],
    "yes and no": [
        ("Did Omar agree to the trial?", "Yes", "Yes, he did.", True),
        ("Did Omar agree to the trial?", "Yes", "No, he did not.", False),
        ("Did Omar agree to the trial?", "Yes", "He did.", True),
        ("Did Omar agree to the trial?", "Yes", "He did not.", False),
        ("Did Omar agree to the trial?", "No", "He didn't.", True),
        ("Did Omar agree to the trial?", "No", "He refused the trial.", True),
        ("Did Omar agree to the trial?", "Yes", "He refused the trial.", False),
        ("Did Omar agree to the trial?", "Yes", "He agreed to the trial.", True),
        ("Did Omar agree to the trial?", "No", "He agreed to the trial.", False),
        ("Did Omar agree to the trial?", "No", "He never agreed to the trial.", True),
        ("Did Omar agree to the trial?", "Yes", "Maybe.", False),
        ("Did Omar agree to the trial?", "No", "Maybe.", False),
        ("Was the trial cancelled?", "Yes", "The trial was cancelled.", True),
        ("Was the trial cancelled?", "Yes", "Yes, no doubt.", True),
        ("Was the trial cancelled?", "Yes", "The trial was not cancelled.", False),
        ("Was the trial cancelled?", "No", "The trial was not cancelled.", True),
        ("Is the gate open?", "No", "The gate is closed.", True),
        ("Is the gate open?", "Yes", "The gate is closed.", False),
        ("Is the gate open?", "Yes", "Yes and no.", False),
        ("Is the gate open?", "No", "No, yes was my first thought.", True),
    ],
    "directions": [
        ("When is the survey?", "July 9", "on July 9", True),
        ("When is the survey?", "July 9", "before July 9", False),
        ("When is the survey?", "July 9", "after July 9", False),
        ("When is the survey?", "before July 9", "before July 9", True),
        ("When is the survey?", "before July 9", "after July 9", False),
        ("How many pumps leak?", "more than 40", "more than 40 pumps", True),
        ("How many pumps leak?", "more than 40", "less than 40 pumps", False),
        ("How many pumps leak?", "40", "over 40 pumps", False),
        ("What is the maximum load?", "40 tons", "at most 40 tons", True),
        ("What is the minimum load?", "40 tons", "at least 40 tons", True),
        ("What is the minimum load?", "40 tons", "at most 40 tons", False),
    ],
    "changes": [
        ("When is the kickoff now?", "June 11", "It was moved from June 4 to June 11.", True),
        ("When is the kickoff now?", "June 4", "It was moved from June 4 to June 11.", False),
        ("When is the kickoff now?", "June 11", "It was moved from June 11 to June 4.", False),
        ("Who leads the survey?", "Ada Moss", "Ada Moss instead of Bo Hale", True),
        ("Who leads the survey?", "Bo Hale", "Ada Moss instead of Bo Hale", False),
        ("Who leads the survey?", "Bo Hale", "Ada Moss, not Bo Hale", False),
        ("Who leads the survey?", "Ada Moss", "Ada Moss, not Bo Hale", True),
        ("When is the drill?", "May 3", "Originally May 2, now May 3", True),
    ],
    "doubt": [
        ("Where are the seals?", "in the red shed", "I doubt that they are in the red shed.", False),
        ("Where are the seals?", "in the red shed", "It is a lie that they are in the red shed.", False),
        ("Where are the seals?", "in the red shed", "They are in the red shed, which is wrong.", False),
        ("Where are the seals?", "in the red shed", "In the red shed, without doubt.", True),
        ("Where are the seals?", "in the red shed", "IT IS NOT TRUE THAT THEY ARE IN THE RED SHED", False),
        ("Who wrote he ain't heavy?", "Bo Hale", '"He Ain\'t Heavy" was written by Bo Hale.', True),
        ("Where are the seals?", "in the red shed", "Perhaps in the red shed", False),
        ("Where are the seals?", "in the red shed", "In the red shed? No.", False),
        ("Where are the seals?", "in the red shed", "In the red shed?", False),
        ("Where are the seals?", "in the red shed", "They are not in the red shed.", False),
        ("Where are the seals?", "in the red shed", "I do not know where the seals are.", False),
        ("Where are the seals?", "in the red shed", "In the red shed. I could not find which shelf.", True),
    ],
    "rivals": [
        ("When is the drill?", "May 3", "May 3 or May 4", False),
        ("When is the drill?", "May 3", "May 3 and May 4", False),
        ("Which leaks, the pump or the valve?", "the pump", "It is the pump or the old valve", False),
        ("When is the drill?", "May 3", "May 3, May 4, May 5", False),
        ("How many people came?", "12", "12 people: 5 men and 7 women", True),
        ("How many people came?", "12", "5 men and 8 women, 12 people", False),
        ("Which firm delivers the paint?", "Corvane Coatings", "Corvane Coatings or Delmar Paints", False),
        ("Which firm delivers the paint?", "Corvane Coatings", "Corvane Coatings and Delmar Paints", False),
        ("Which firm delivers the paint?", "Corvane Coatings", "Corvane", True),
        ("Which city is it?", "Houston", "Houston, Texas", True),
        (
            "What did they agree on?",
            "Corvane brings the paint and Aldine brings the timber",
            "Corvane and Delmar: Corvane brings the paint, Aldine brings the timber",
            True,
        ),
        ("Who won?", "Ada Moss", "Ada Moss, with 11 points.", True),
        ("Who won?", "Ada Moss", "Ada Moss for Harry and Tonto", True),
        ("Who won?", "Ada Moss/Bo Hale", "Ada Moss and Bo Hale", True),
        ("Who won?", "Ada Moss/Bo Hale", "Ada Moss and Cy Orr", False),
        ("What is the risk?", "Currency risk", "Currency risk, credit risk and market risk", False),
        ("How many moons are there?", "2", "It has two moons, Ada and Bo.", True),
        ("When is it now?", "May 3", "It was planned for May 3, but Ada has moved it to May 9.", False),
        ("What did she order?", "two lemon cakes with cream", "two lime cakes with cream", False),
    ],
    "units": [
        ("What is the discount?", "15%", "15 basis points", False),
        ("What is the fee?", "25 basis points", "0.25%", True),
        ("By how much did it rise?", "5%", "5 percentage points", False),
        ("By how much was it cut?", "50 basis points", "half a percentage point", True),
        ("How heavy is the crate?", "5 kg", "5 lb", False),
        ("How heavy is the crate?", "5 lbs", "five pounds", True),
        ("How warm is it?", "72\u00b0F", "72 degrees Fahrenheit", True),
        ("How warm is it?", "72\u00b0F", "72\u00b0C", False),
        ("How much gas flows?", "10,000 MMBtu per day", "10000 mmbtu/d", True),
        ("How much gas flows?", "10,000 MMBtu per day", "10000 mmbtu/month", False),
        ("How large is the shed?", "2,000 square feet", "2,000 sq. ft.", True),
        ("How large is the shed?", "2,000 square feet", "2,000 square meters", False),
        ("What is the price?", "$5 per cubic foot", "$5 per cubic meter", False),
        ("How long will it take?", "a week", "7 days", True),
        ("How long will it take?", "seven days", "a week", True),
        ("How long will it take?", "a week", "a month", False),
        ("What fraction leaks?", "1/2", "0.5", True),
        ("What fraction leaks?", "1/2", "0.2", False),
        ("What fraction leaks?", "0.25", "\u00bc", True),
        ("How long did it last?", "1\u00bd hours", "90 minutes", True),
        ("How long did it last?", "2 hours 30 minutes", "2.5 hours", True),
        ("How long did it last?", "2 hours 30 minutes", "2 hours", False),
        ("How long did it last?", "2 hours", "2 sessions", False),
        ("How long did it last?", "2 hours", "2 full hours", True),
        ("What share voted for it?", "15%", "15 members", False),
        ("How many voted for it?", "15", "15 members", True),
        ("How many members voted for it?", "15 or 40%", "15 members", False),
        ("What is the wage?", "$5/hour", "$5/day", False),
    ],
    "time zones": [
        ("When is the call?", "10 AM CST", "10 AM EST", False),
        ("When is the call?", "10 AM CST", "11 AM EST", True),
        ("When is the call?", "10 AM CST", "10:00 a.m. Central (11 a.m. Eastern)", True),
        ("When is the call?", "10 AM CST", "at 10 AM", True),
        ("When is the call?", "10:00 AM (CST)", "10:00 AM (PST)", False),
    ],
    "scores and ratios": [
        ("What was the final score?", "3-1", "1-3", False),
        ("What was the final score?", "3-1", "It was 3 to 1.", True),
        ("What is the ratio?", "2:1", "1:2", False),
        ("What was the vote?", "7 to 2", "They voted 2 to 7.", False),
        ("What were the scores?", "3-1", "1-3 at first, then 3-1", True),
    ],
    "versions": [
        ("Which version is installed?", "2.1", "2.10", False),
        ("Which version is installed?", "2.1", "version 2.1", True),
        ("Which version is installed?", "2.1", "2.1.3", False),
        ("What's the section?", "5.1", "Section 5.10", False),
        ("What is the version price?", "2.1", "2.10", True),
        ("What is the mean?", "2.1", "2.10", True),
    ],
    "subjects": [
        ("What is the subject?", "Re: Pumps", "Pumps", True),
        ("What is the subject?", "Pumps", 'It is "FW: Re: Pumps".', True),
        ("What was it about?", "Re: Pumps in June", "Pumps in June", True),
        ("What is the subject?", "Re: Pumps", "Valves", False),
    ],
    "causes": [
        ("Why was it cancelled?", "because of rain", "It was not because of rain.", False),
        ("Why was it cancelled?", "because of rain", "It wasn't because of rain; Ada left.", False),
        ("Why was it cancelled?", "the pump leaked", "It was never because the pump leaked", False),
        ("Why was it cancelled?", "because of rain", "anything but because of rain", False),
        ("Why was it cancelled?", "because of rain", "Not because of cost, but because of rain.", True),
        ("Why was it cancelled?", "because of rain", "It was because of rain.", True),
        ("Why wasn't it held?", "because of rain", "It was not held because of rain.", True),
        ("Why can't they meet?", "because of rain", "They cannot meet because of rain.", True),
    ],
    "for and against": [
        ("What did Ada think of the plan?", "She was for the plan", "She was against the plan", False),
        ("What did Ada think of the plan?", "She supported the plan", "She was in favour of the plan", True),
        ("What did Ada think of the plan?", "She opposed the plan", "She was against the plan", True),
        ("What did Ada suggest?", "to sell the barge", "She was against selling the barge", False),
        ("What did Ada suggest?", "to sell the barge", "She is reluctant to sell the barge", False),
        ("What did Ada suggest?", "to sell the barge", "She vetoed selling the barge", False),
        ("What did Ada advise?", "hiring a clerk", "She advised strongly against hiring a clerk", False),
        ("What is Ada's view?", "against leasing", "Ada is against leasing.", True),
        ("What are the pumps insured against?", "fire and flood", "They are insured against fire and flood.", True),
        ("Who was sued?", "Corvane", "The suit was against Corvane.", True),
        ("Was Ada for the plan?", "Yes", "She was against the plan.", False),
    ],
    "lists of names": [
        ("Who approved it?", "Ada Moss", "The emails mention Ada Moss, Bo Hale, Cy St. Clair and Di Lund.", False),
        ("Who approved it?", "Bo Hale", "The emails mention Ada Moss, Bo Hale, Cy Orr.", False),
        ("Who approved it?", "Ada Moss", "People in the thread are Bo Hale, Ada Moss, Cy Orr, Di Lund.", False),
        ("Who approved it?", "Ada Moss", "Ada Moss; Bo Hale; Cy Orr", False),
        ("Who approved it?", "Ada Moss", "- Bo Hale\n- Ada Moss", False),
        ("Who approved it?", "Ada Moss", "Ada Moss - Bo Hale", False),
        ("Who approved it?", "Ada Moss", "Ada Moss (Corvane Coatings)", True),
        (
            "Which firm won?",
            "Corvane Coatings",
            "The emails mention Corvane Coatings, Delmar Paints, Aldine Works.",
            False,
        ),
        ("Who approved it?", "Ada Moss", "The emails mention Ada Moss.", True),
        ("Who approved it?", "Ada Moss", "Ada Moss (Vice President, Corvane North, Houston)", True),
        ("Where do they meet?", "Denver", "The thread talks about Denver, Tulsa, Omaha, Houston.", False),
        ("Where do they meet?", "Denver", "They meet in Denver, Colorado.", True),
    ],
    "spellings": [
        ("Which colour is it?", "dark grey", "It is dark gray.", True),
        ("What did they visit?", "the theatre centre", "the theater center", True),
    ],
    "what has to be given": [
        ("Who leads the survey?", "Ada Moss (of Corvane)", "Ada Moss", True),
        (
            "What did she buy?",
            "a red pump, a blue valve and a green gate",
            "a new red valve, a blue pump and a green gate",
            False,
        ),
        (
            "What did she buy?",
            "a red pump, a blue valve and a green gate",
            "a big new red valve, a blue pump and a green gate",
            False,
        ),
        ("How many pumps leak?", "none", "No pumps leak.", True),
        ("How many pumps leak?", "0", "3", False),
        ("How many pumps leak?", "0", "none", True),
        ("Who runs it?", "Federal Power Commission (FPC)", "the FPC", True),
        ("Who runs it?", "Federal Power Commission (FPC)", "the ACC", False),
        ("Who runs it?", "Abid Ali Moss", "abidali moss", True),
        ("Who came?", "Ada Moss, Bo Hale and Cy Orr", "Cy Orr, Ada Moss, Bo Hale", True),
        ("Who came?", "Ada Moss, Bo Hale and Cy Orr", "Ada Moss and Bo Hale", False),
        ("Who pays?", "Ada Moss", "Moss", True),
        ("Who pays?", "Ada Moss", "A. Moss", True),
        ("Who pays?", "Ada Moss", "Ida Moss", False),
        ("Who pays?", "Ada Moss", "ida moss", False),
        ("Who pays?", "Ada Moss", "M.", False),
        ("Which college is it?", "Ada B. Moss", "Ada Moss", True),
        ("At what time on May 3 does it begin?", "May 3 at 4 pm", "at 4 pm", True),
        ("At what time on May 3 does it begin?", "May 3 at 4 pm", "on May 3", False),
        ("Who pays?", "Ada Moss", "Ada Hale", False),
        ("Who pays?", "Katherine Bellwood", "Katherine Belwood", False),
        ("What did she buy?", "a pump and two valves", "two valves and a pump", True),
        ("What did she buy?", "a pump and two valves", "three valves and a pump", False),
        (
            "What did she buy?",
            "a red pump, a blue valve and a green gate",
            "a red valve, a blue pump and a green gate",
            False,
        ),
    ],
    "finer points": [
        ("Which hill is highest?", "Corvane/Mount Selwick", "Corvane/Mount Selwick Omega Tobago Gas Holdings", False),
        ("Which time zone does the schedule use?", "Central European Time", "European Time", False),
        (
            "What nationality was the explorer?",
            "Norwegian",
            "He was Norwegian. He led the first party to reach the pole in winter, long before the British ships "
            "arrived with horses, dogs, sledges, tents and coal.",
            False,
        ),
        ("Did Carla agree?", "Yes", "Yes, Carla didn't wait.", True),
        ("When is the audit due?", "the start of April and the end of June", "April and June", False),
        ("Which site floods?", "Red Oak", "Red is by Oak.", False),
        ("Which site floods?", "Harbor Vale", "Harbor floods.", True),
        ("Who pays?", "Cher and Bo Hale", "Ada Finn Cher Bo Hale", False),
    ],
}


@pytest.mark.parametrize(
    ("question", "reference", "answer", "verdict"),
    [pytest.param(*case, id=f"{rule}: {case[2]}") for rule, cases in RULES.items() for case in cases],
)
def test_verdicts(question: str, reference: str, answer: str, verdict: bool) -> None:
    assert match(question, reference, answer) is verdict
