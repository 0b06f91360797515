"""The model families that can be run, one file each. No torch here."""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models import fast_dllm_v2, llada2, nemotron, sdar
from dlmgrid.workers.models.family import Family, KnownModel

FAMILIES: dict[str, Family] = {
    family.name: family for family in (sdar.FAMILY, llada2.FAMILY, fast_dllm_v2.FAMILY, nemotron.FAMILY)
}
"""Families by name."""


def get_family(name: str) -> Family:
    """The family that a :class:`~dlmgrid.workers.models.config.ModelConfig` names."""
    return FAMILIES[name]


def family_of(path: Path, model_type: object) -> Family:
    """The family of a config.json's ``model_type``. Raises InputError, listing the known, for another."""
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.model_types)
    raise InputError(f"{path}: model_type is {model_type!r}; known families: {known}")


def known_models() -> tuple[KnownModel, ...]:
    """Every published checkpoint that a family knows."""
    return tuple(model for family in FAMILIES.values() for model in family.published)
