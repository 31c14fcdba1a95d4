"""The mail-search task: tools, prompt, stop rules and rubric, after ART-E; and the conversations that play it."""

from emailrl.agent.task import MailEnvironment, Rubric, StepResult
from emailrl.agent.tools import tool_schemas

__all__ = ["MailEnvironment", "Rubric", "StepResult", "tool_schemas"]
