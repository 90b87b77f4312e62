"""The SLO classes as a versioned document: the whole set is one value, so that no reader sees half a change."""

from __future__ import annotations

import json
from dataclasses import asdict

from baton.slo import DEFAULT_CLASSES, SLO
from router.controller.versioned import Format

SLOSet = tuple[SLO, ...]


def _encode(classes: SLOSet) -> str:
    return json.dumps([asdict(slo) for slo in classes], allow_nan=False)


def _decode(body: str) -> SLOSet:
    return tuple(SLO(**fields) for fields in json.loads(body))


SLO_SET: Format[SLOSet] = Format("slo", _encode, _decode, DEFAULT_CLASSES)
