"""One door to the API server: the only module that imports kubernetes. JSON in, JSON out, every error in our own words.

A call has a deadline and is tried once: whoever retries decides again first. While the server has asked us to wait (429 or 503
with Retry-After) nothing is sent. Calls block: threads only (calls.py). Any thread may call, and read `counts`.
Errors:
    Conflict, Expired       errors.py; for code
    NotFound                no such object
    Unavailable             away, slow, busy, broken, or it forbids it; the message says which, for operators
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import urllib3
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException, load_incluster_config

from baton import clock
from baton.config import KubernetesConfig
from baton.errors import ConfigError, NotFound, Unavailable
from router.controller.kube.errors import Conflict, Expired
from router.controller.kube.objects import JsonObject
from router.series import header, labelled, sample

CONNECT_S = 2.0  # within a cluster a round trip is a millisecond
ANSWER_S = 5.0  # slow is less than half a lease (10 s), so that a slow server costs nobody its lease
MAX_RETRY_AFTER_S = 60.0  # whatever a server says
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"  # with a list as body; other types would be sent as a strategic merge
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_LONGEST_REASON = 300  # characters of a server's message that operators get to see

Query = Sequence[tuple[str, str]]


class CallCounts:
    """How calls went; `lines` is a part of the metrics page."""

    def __init__(self, now_s: Callable[[], float] = clock.now_s) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._answered_s = now_s()

    @property
    def age_s(self) -> float:
        """Since the server last answered anything."""
        return self._now_s() - self._answered_s

    def note(self, verb: str, outcome: str, *, answered: bool) -> None:
        with self._lock:
            self._counts[verb, outcome] += 1
            if answered:
                self._answered_s = self._now_s()

    def lines(self) -> Iterator[str]:
        with self._lock:
            counts = dict(self._counts)
        name = "baton_kube_api_calls_total"
        yield header(name, "Calls to the API server by outcome: ok, a status, or away.", "counter")
        for key in sorted(counts):
            yield sample(name, labelled(("verb", "outcome"), key), counts[key])
        name = "baton_kube_api_silence_seconds"
        yield header(name, "Since the API server last answered.", "gauge")
        yield sample(name, "", self.age_s)


class Client:
    """Of one namespace."""

    def __init__(self, config: KubernetesConfig, now_s: Callable[[], float] = clock.now_s) -> None:
        """Raises: ConfigError: not in a cluster, or what is configured cannot be used."""
        self.counts = CallCounts(now_s)
        self._now_s = now_s
        self._token_file = Path(config.token_file) if config.token_file else None
        self._api = ApiClient(_configuration(config))
        self.namespace = config.namespace or _own_namespace()
        self._not_before_s = float("-inf")

    def close(self) -> None:
        self._api.close()

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Query = (),
        content_type: str = "application/json",
        invalid_is_conflict: bool = False,
    ) -> JsonObject:
        """`path` as in the API reference, with {namespace}. `invalid_is_conflict`: of a JSON Patch; a failed `test` is a 422."""
        response = self._send(method, path, body, query, content_type, (CONNECT_S, ANSWER_S))
        try:
            data = response.read()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._away(method, error) from error
        finally:
            response.release_conn()
        self._check(method, response, data, invalid_is_conflict)
        return _decoded(data)

    def watch(self, path: str, query: Query, seconds: int) -> Iterator[JsonObject]:
        """Events {type, object} until the server ends it, after `seconds` at the latest.

        Raises:
            Expired: the version is too old.
            Unavailable: also where it breaks off.
        """
        asked = (*query, ("watch", "true"), ("timeoutSeconds", str(seconds)))
        response = self._send("WATCH", path, None, asked, "", (CONNECT_S, seconds + ANSWER_S))
        try:
            if response.status != 200:
                self._check("WATCH", response, response.read(), False)
            self.counts.note("WATCH", "ok", answered=True)
            for line in _lines(response):
                event = _decoded(line)
                if event.get("type") == "ERROR":
                    raise _stream_error(event.get("object") or {})
                yield event
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._away("WATCH", error) from error
        finally:
            response.close()
            response.release_conn()

    def _send(
        self, method: str, path: str, body: object, query: Query, content_type: str, timeout_s: tuple[float, float]
    ) -> Any:
        """The open answer, whatever its status."""
        if (wait_s := self._not_before_s - self._now_s()) > 0:
            raise Unavailable(f"the API server asked for a pause of {wait_s:.0f} s more", retry_after_s=wait_s)
        if self._token_file is not None:  # tokens are renewed in place
            self._api.configuration.api_key["BearerToken"] = f"Bearer {_read(self._token_file)}"
        headers = {"Accept": "application/json", "User-Agent": "baton-controller"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            request = self._api.param_serialize(
                "GET" if method == "WATCH" else method,
                path.replace("{namespace}", self.namespace),
                query_params=list(query),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            return self._api.call_api(*request, _request_timeout=timeout_s).response
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            raise self._away(method, error) from error

    def _away(self, method: str, error: Exception) -> Unavailable:
        self.counts.note(method, "away", answered=False)
        return Unavailable(f"the API server is away: {type(error).__name__}", retry_after_s=ANSWER_S)

    def _check(self, method: str, response: Any, data: bytes, invalid_is_conflict: bool) -> None:
        """Raises: as the class says."""
        status = int(response.status)
        self.counts.note(method, "ok" if status < 300 else str(status), answered=status < 500)
        if status < 300:
            return
        said = _decoded(data) if data.startswith(b"{") else {}
        reason = str(said.get("message") or response.reason)[:_LONGEST_REASON]
        if status == 409 or (status == 422 and invalid_is_conflict):
            raise Conflict(reason)
        if status == 410:
            raise Expired(reason)
        if status == 404:
            raise NotFound(reason)
        if status == 403:
            raise Unavailable(f"the API server forbids it: {reason}; does the release's Role fit this version?")
        if status == 429 and _is_disruption_budget(said):
            raise Unavailable(f"a PodDisruptionBudget does not allow it now: {reason}", retry_after_s=ANSWER_S)
        if (retry_after_s := _retry_after_s(response.headers)) is not None:
            self._not_before_s = self._now_s() + retry_after_s
            raise Unavailable(f"the API server is busy ({status})", retry_after_s=retry_after_s)
        raise Unavailable(f"the API server answered {status}: {reason}", retry_after_s=ANSWER_S)


def _configuration(config: KubernetesConfig) -> Any:
    found = Configuration()
    if config.api_server:
        found.host = config.api_server
        found.ssl_ca_cert = config.ca_file or None
    else:
        try:
            load_incluster_config(found)
        except ConfigException as error:
            raise ConfigError(
                f"kubernetes.fullname is set, but this is no pod with a service account ({error}); elsewhere set"
                " kubernetes.api_server and kubernetes.token_file",
                field="kubernetes.api_server",
            ) from error
    found.retries = False  # a write that is sent twice is not a compare-and-swap
    return found


def _own_namespace() -> str:
    return _read(Path(_NAMESPACE_FILE))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", field="kubernetes.token_file") from error


def _decoded(data: bytes) -> JsonObject:
    try:
        body = json.loads(data or b"{}")
    except ValueError as error:
        raise Unavailable("the API server's answer is not JSON; is that a proxy?") from error
    if not isinstance(body, dict):
        raise Unavailable("the API server's answer is no JSON object; is that a proxy?")
    return body


def _lines(response: Any) -> Iterator[bytes]:
    """Whole ones; what breaks off in the middle of one is no event."""
    rest = b""
    for part in response.stream(amt=None, decode_content=False):
        *whole, rest = (rest + part).split(b"\n")
        yield from (line for line in whole if line.strip())


def _stream_error(status: JsonObject) -> Exception:
    message = str(status.get("message", ""))[:_LONGEST_REASON]
    return Expired(message) if status.get("code") == 410 else Unavailable(f"the watch failed: {message}")


def _is_disruption_budget(status: JsonObject) -> bool:
    causes = (status.get("details") or {}).get("causes") or ()
    return any(cause.get("reason") == "DisruptionBudget" for cause in causes)


def _retry_after_s(headers: Any) -> float | None:
    said = str(headers.get("Retry-After", ""))
    return min(float(said), MAX_RETRY_AFTER_S) if said.isdecimal() else None
