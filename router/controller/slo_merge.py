"""Applies what an operator sent to the classes in force; an unknown class is named with the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from baton.errors import NotFound
from baton.slo import SLO
from router.controller.admin_models import SLOClass, SLOClassPatch
from router.controller.slo_store import SLOSet


def class_of(classes: SLOSet, name: str) -> SLO:
    """Raises: NotFound."""
    for slo in classes:
        if slo.name == name:
            return slo
    known = [slo.name for slo in classes]
    raise NotFound(f"no SLO class {name!r}{_nearest(name, known)}; there are: {', '.join(known)}", field="name")


def patched(classes: SLOSet, name: str, patch: SLOClassPatch) -> SLO:
    """A known class with the patch's fields.

    Raises:
        NotFound.
        ValidationError: a required target was emptied.
    """
    fields = dataclasses.asdict(class_of(classes, name))
    fields.pop("name")
    return SLOClass(**{**fields, **patch.model_dump(exclude_unset=True)}).named(name)


def patched_set(base: SLOSet, patches: Mapping[str, SLOClassPatch | None]) -> SLOSet:
    """The set with each class changed, added where the patch has all that a class needs, or, for None, removed.

    Raises:
        NotFound: a class that is not there was to be removed, or changed.
        ValidationError: a required target was emptied.
    """
    classes = {slo.name: slo for slo in base}
    for name, patch in patches.items():
        if patch is None:
            class_of(base, name)
            del classes[name]
        elif name in classes:
            classes[name] = patched(base, name, patch)
        else:
            classes[name] = _new(name, patch, classes)
    return tuple(classes.values())


def _new(name: str, patch: SLOClassPatch, known: Iterable[str]) -> SLO:
    try:
        return SLOClass(**patch.model_dump(exclude_unset=True)).named(name)
    except ValidationError:
        raise NotFound(
            f"classes.{name}: no such SLO class{_nearest(name, known)}; a new one needs ttft_ms and tpot_ms",
            field=f"classes.{name}",
        ) from None


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (the nearest is {near[0]!r})" if near else ""
