"""What a tenant's keys limit: answers at once, requests per minute, tokens per minute. Pure.

Rates are buckets that hold one minute's worth, so a minute of silence may be made up for and no more; at least one call, or
a limit of less than one per minute would let none pass. Tokens are taken when
they are known, prompt first, output at the end; a bucket may go below 0 then, and the next call waits until it is above. A
refusal names the limit and when it will be kept. A tenant that nobody limits costs nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import InvalidRequest, Overloaded
from router.tenants import NO_LIMIT, Tenant

MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """Of one limit. `spent` is what was taken out and has not come back."""

    spent: float = 0.0
    at_s: float = 0.0

    def level(self, per_min: float, now_s: float) -> float:
        self.spent = max(0.0, self.spent - (now_s - self.at_s) * per_min / MINUTE_S)
        self.at_s = now_s
        return max(1.0, per_min) - self.spent


@dataclass(slots=True)
class _Use:
    requests: _Bucket
    tokens: _Bucket
    num_seqs: int = 0


class Quotas:
    """All tenants' use of their limits."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def take(self, tenant: Tenant, num_seqs: int, now_s: float) -> None:
        """A call of `num_seqs` answers begins; `give_back` them at its end.

        Raises:
            Overloaded: a limit is reached; nothing was taken. `field` names the limit.
            InvalidRequest: it can never be kept.
        """
        use = self._use(tenant)
        if num_seqs > tenant.max_concurrent:
            raise InvalidRequest(f"n is {num_seqs}; the limit of this key is {tenant.max_concurrent:g}", field="n")
        if use.num_seqs + num_seqs > tenant.max_concurrent:
            raise Overloaded(
                f"max_concurrent: {use.num_seqs} answers are under way; the limit of this key is {tenant.max_concurrent:g}",
                field="max_concurrent",
                retry_after_s=1.0,
            )
        # A request must fit whole; of tokens, of which nobody knows how many it will take, one must be left.
        for field, bucket, per_min in (
            ("requests_per_min", use.requests, tenant.requests_per_min),
            ("tokens_per_min", use.tokens, tenant.tokens_per_min),
        ):
            if per_min != NO_LIMIT and (lacking := 1.0 - bucket.level(per_min, now_s)) > 0:
                raise Overloaded(
                    f"{field}: the limit of this key is {per_min:g}",
                    field=field,
                    retry_after_s=lacking * MINUTE_S / per_min,
                )
        use.num_seqs += num_seqs
        if tenant.requests_per_min != NO_LIMIT:
            use.requests.spent += 1.0

    def spend(self, tenant: Tenant, num_tokens: int, now_s: float) -> None:
        """The prompt is known, or the answer; below 0: they were not used."""
        if tenant.tokens_per_min != NO_LIMIT:
            bucket = self._use(tenant).tokens
            bucket.level(tenant.tokens_per_min, now_s)
            bucket.spent += num_tokens

    def give_back(self, tenant: Tenant, num_seqs: int) -> None:
        self._use(tenant).num_seqs -= num_seqs

    def num_seqs(self, tenant: Tenant) -> int:
        return self._use(tenant).num_seqs

    def _use(self, tenant: Tenant) -> _Use:
        use = self._uses.get(tenant.name)
        if use is None:
            use = self._uses[tenant.name] = _Use(_Bucket(), _Bucket())
        return use
