"""What to do when a chat server fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emailrl.settings import without_credentials

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True, slots=True)
class Remedies:
    """Remedies for the failures of one chat server, in terms of the settings that it was reached with."""

    model: str
    base_url: str
    key_name: str
    """The environment variable of the server's key."""
    has_key: bool

    def for_error(self, error: openai.APIError) -> str:
        """What to do about an error of the client, by its HTTP status if the server replied."""
        from emailrl.remote.chat import is_incomplete, is_timeout

        match getattr(error, "status_code", None):
            case None:
                if is_timeout(error):
                    return "If the server is only slow, raise LITELLM_TIMEOUT."
                if is_incomplete(error):
                    return self.for_reply()
                return "Check OPENAI_BASE_URL, and that the server runs."
            case 401 | 403 if not self.has_key:
                return f"Set {self.key_name} to a key of this server."
            case 401:
                return f"Check {self.key_name}."
            case 403:
                return f"Check what the key in {self.key_name} may use."
            case 402:
                return "Add credit to the account."
            case 404:
                return f"Check --model ({self.model}) and {self._address}."
            case 408 | 409 | 429:
                return "Try again later, or lower ROLLOUT_CONCURRENCY."
            case status if status >= 500:
                return "Try again later, or check the server's log."
            case status if status < 400:
                return f"The server redirects requests: check {self._address}."
        return f"Check that {self.model} supports tool calls and the sampling settings."

    def for_reply(self) -> str:
        """What to do about a reply that is not a chat completion."""
        if self.base_url.rstrip("/").endswith("/v1"):
            return f"Check {self._address} and the server's log."
        return f"Check {self._address}: most addresses end in /v1."

    @property
    def _address(self) -> str:
        return f"OPENAI_BASE_URL ({without_credentials(self.base_url)})"
