"""Compares two privacy profiles: the features that they do not treat alike. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from cloister.policy.features import ALWAYS_THERE, FEATURES, Feature
from cloister.policy.verdict import Profile, Verdict


def all_features() -> tuple[Feature, ...]:
    """Returns every feature that this build can be asked for, then what is always there."""
    return (*FEATURES.values(), *ALWAYS_THERE)


def differing_features(first: Profile, second: Profile) -> Iterator[Feature]:
    """Yields the features that two profiles do not treat alike: another verdict, or another condition of what is mitigated."""
    for feature in all_features():
        ours, theirs = feature.rulings[first], feature.rulings[second]
        is_conditional = ours.verdict is Verdict.MITIGATED
        if ours.verdict is not theirs.verdict or (is_conditional and ours.text != theirs.text):
            yield feature


def compare_profiles(first: Profile, second: Profile) -> dict[str, object]:
    """Returns `differing_features` as lists and dicts that JSON can hold."""
    return {
        "profiles": [first.value, second.value],
        "features": [
            {
                "feature": feature.title,
                "setting": feature.setting,
                "does": feature.does,
                "endangers": feature.endangers,
                **{profile.value: asdict(feature.rulings[profile]) for profile in (first, second)},
            }
            for feature in differing_features(first, second)
        ],
    }
