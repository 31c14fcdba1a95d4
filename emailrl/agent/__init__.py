"""The mail-search task: tools, prompt, stop rules and rubric, after ART-E."""

from emailrl.agent.mail_env import MailEnvironment, StepResult
from emailrl.agent.rubric import Rubric
from emailrl.agent.tools import tool_schemas

__all__ = ["MailEnvironment", "Rubric", "StepResult", "tool_schemas"]
