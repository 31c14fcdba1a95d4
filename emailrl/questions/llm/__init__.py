"""Questions written by a language model about the emails of a database, on any OpenAI-compatible server.

``plan_questions`` chooses the emails and estimates the cost, ``QuestionWriter.ask`` fetches the replies into the cache,
and ``harvest`` checks them and builds the questions. Each step can be repeated: nothing is paid for twice.
"""

from emailrl.questions.llm.ask import QuestionWriter, Spending
from emailrl.questions.llm.client import GenerationError
from emailrl.questions.llm.generate import Harvest, harvest
from emailrl.questions.llm.plan import DEFAULT_LIMIT, QuestionPlan, plan_questions, price_of

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
