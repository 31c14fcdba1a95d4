"""Questions written by a language model about the emails of a database, on any OpenAI-compatible server.

``plan_questions`` chooses the emails and estimates the cost, ``QuestionWriter.ask`` fetches the replies into the cache,
and ``harvest`` checks them and builds the questions. Each step can be repeated: nothing is paid for twice.
"""

from emailrl.questions.llm.plan import QuestionPlan, plan_questions
from emailrl.questions.llm.replies import GenerationError, Harvest, QuestionWriter, Spending, harvest

__all__ = ["GenerationError", "Harvest", "QuestionPlan", "QuestionWriter", "Spending", "harvest", "plan_questions"]
