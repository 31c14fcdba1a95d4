"""The mail-search task: tools, prompt, stop rules and rubric, after ART-E."""

from emailrl.environment.mail_env import MailEnvironment, StepResult
from emailrl.environment.rubric import Rubric
from emailrl.environment.tools import tool_schemas

__all__ = ["MailEnvironment", "Rubric", "StepResult", "tool_schemas"]
