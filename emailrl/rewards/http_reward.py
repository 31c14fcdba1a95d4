"""A reward computed by a server: in batches, with retries and timeouts, never guessed on failure."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import httpx

from emailrl.errors import EmailRLError, UsageError
from emailrl.remote.destination import tell
from emailrl.remote.reply import Client, wait_for
from emailrl.remote.retry import may_pass, pause, pause_asked_for
from emailrl.rewards.http_protocol import read_reply, request_body
from emailrl.rewards.scorer import Terms
from emailrl.settings import RewardSettings, redacted, secrets_in, split_credentials, without_credentials
from emailrl.trajectory import Trajectory

logger = logging.getLogger(__name__)


class _Client(Client):
    max_bytes = 64 << 20
    """Maximum size of a scorer's reply."""


def is_url(name: str) -> bool:
    """Whether a reward's name is a server URL."""
    return name.lower().startswith(("http://", "https://"))


class HttpReward:
    """Posts trajectories to ``url`` (see ``http_protocol``).

    ``REWARD_BATCH_SIZE`` trajectories go in one request and at most ``concurrency`` requests at once. A batch is
    retried after 1, 2, 4, … seconds if the server is down, busy or failing, ``REWARD_RETRIES`` times; a final failure,
    or an invalid reply, is an error of that batch's trajectories.
    """

    def __init__(self, url: str, settings: RewardSettings, *, concurrency: int) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(f"The reward's URL is invalid: {error}.", "Expected http://host:port/path.") from None
        if not parsed.host:
            raise UsageError("The reward's URL has no host.", "Expected http://host:port/path.")
        key = settings.reward_api_key.get_secret_value() if settings.reward_api_key else ""
        tell(url, "reward", with_key=bool(key or parsed.userinfo))
        self._settings = settings
        self._concurrency = concurrency
        self._secrets = [key, *secrets_in(url)]
        self._url, credentials = split_credentials(url)  # httpx logs request URLs
        self._shown = without_credentials(url)
        self._client = _Client(
            auth=credentials,
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {key}"} if key and credentials is None else {}),
            timeout=settings.reward_timeout,
        )

    def score_batch(self, trajectories: Sequence[Trajectory]) -> list[Terms]:
        """One dict of terms, or an error, per trajectory, in order."""
        size = self._settings.reward_batch_size
        batches = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
        if len(batches) <= 1:
            return [terms for batch in batches for terms in self._score(batch)]
        with ThreadPoolExecutor(min(self._concurrency, len(batches)), thread_name_prefix="reward") as pool:
            return [terms for scored in pool.map(self._score, batches) for terms in scored]

    def _score(self, batch: Sequence[Trajectory]) -> list[Terms]:
        try:
            return [*read_reply(self._post(request_body(batch)), batch, f"The scorer {self._shown}", self._tellable)]
        except EmailRLError as error:
            masked = EmailRLError(self._tellable(error.message), error.hint)
            logger.warning("%d trajectories got no reward: %s", len(batch), masked)
            return [masked] * len(batch)

    def _tellable(self, text: str) -> str:
        return redacted(text, *self._secrets, limit=500)

    def _post(self, body: dict[str, Any]) -> Any:
        """The reply's JSON; raises EmailRLError when there is none after the last try."""
        # ASCII only: email text may not be encodable.
        content, failure, wait = json.dumps(body).encode(), "", 0.0
        for tries in range(self._settings.reward_retries + 1):
            if tries:
                sleep(pause(tries, wait))
            wait = 0.0
            try:
                response = wait_for(self._client.post(self._url, content=content))
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return _json(response, self._shown)
            failure, wait = f"HTTP {response.status_code}: {response.text}", pause_asked_for(response.headers)
            if not may_pass(response.status_code):
                break
        # Raised outside the handler: the client's exception, chained, would carry the request and its credentials.
        raise EmailRLError(
            f"The scorer {self._shown} returned no rewards: {failure.rstrip('.')}.", "Check the server and its URL."
        )


def _json(response: httpx.Response, shown: str) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError):  # nested too deep to be read
        raise EmailRLError(f"The scorer {shown} replied with invalid JSON: {response.text!r}") from None
