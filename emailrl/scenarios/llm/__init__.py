"""Questions written by a language model from the mails of a database, over any OpenAI-compatible server.

``plan_questions`` chooses the mails and estimates the cost, ``QuestionWriter.ask`` gets the replies into the cache,
``harvest`` checks them and makes the questions. Each step can be run again: nothing is paid for twice.
"""

from emailrl.scenarios.llm.ask import QuestionWriter, Spending
from emailrl.scenarios.llm.client import GenerationError
from emailrl.scenarios.llm.generate import Harvest, harvest
from emailrl.scenarios.llm.plan import DEFAULT_LIMIT, QuestionPlan, plan_questions, price_of

__all__ = [
    "DEFAULT_LIMIT",
    "GenerationError",
    "Harvest",
    "QuestionPlan",
    "QuestionWriter",
    "Spending",
    "harvest",
    "plan_questions",
    "price_of",
]
