"""The mail-search task: tools, prompt, stop rules and rubric, after ART-E."""

from emailrl.environment.mail_env import MailEnvironment, StepResult
from emailrl.environment.rubric import Rubric, is_i_dont_know
from emailrl.environment.tools import tool_schemas

__all__ = ["MailEnvironment", "Rubric", "StepResult", "is_i_dont_know", "tool_schemas"]
