"""The rules of the active profile, and the only place that refuses features. Pure: data in, verdicts out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.policy.features import FEATURES, Feature
from cloister.policy.matrix import find_row, row_of
from cloister.policy.verdict import Profile, Ruling, Verdict
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.scope import ScopeKind
from cloister.types.threat import ThreatProfile


@dataclass(frozen=True, slots=True)
class Use:
    """A request to switch a feature on or off.

    Attributes:
        wanted: on, off, or None for the default.
        source: origin of the request, for the refusal, such as "flag"; never what a user sent.
    """

    wanted: bool | None
    source: str


_WIDEST_SCOPE: Mapping[Profile, ScopeKind] = {
    Profile.OPEN: ScopeKind.LOCAL,
    Profile.TEAM: ScopeKind.TENANT,
    Profile.PRIVATE: ScopeKind.REQUEST,
    Profile.PARANOID: ScopeKind.REQUEST,
}


class Policy:
    """The rules of one profile. A feature that it refuses cannot be switched on by any means.

    Raises:
        ConfigError: the profile does not exist.
    """

    def __init__(self, profile: str) -> None:
        if profile not in tuple(Profile):
            raise ConfigError(f"profile must be one of: {', '.join(Profile)}", param="profile")
        self.profile = Profile(profile)

    def __repr__(self) -> str:
        return f"Policy({self.profile.value!r})"

    @property
    def widest_scope(self) -> ScopeKind:
        """The widest scope in which KV may be reused."""
        return _WIDEST_SCOPE[self.profile]

    @property
    def names_tenants(self) -> bool:
        """Whether the engine may learn the tenant of a request, not only its class."""
        return self.widest_scope is not ScopeKind.REQUEST

    @property
    def counts_only(self) -> bool:
        """Whether metrics are published through a `CountRelease` only."""
        return row_of("profiling").rulings[self.profile].verdict is not Verdict.ALLOWED

    def ruling(self, feature: str) -> Ruling:
        """Returns the profile's ruling on a feature of `FEATURES` (KeyError if there is none)."""
        return FEATURES[feature].rulings[self.profile]

    def allows(self, feature: str) -> bool:
        return self.ruling(feature).verdict is not Verdict.REFUSED

    def check(self, features: Mapping[str, Use]) -> None:
        """Checks several requests by feature name.

        Raises:
            PolicyError: one is wanted and refused; the message names the rule and says what to change.
        """
        for name, use in features.items():
            if use.wanted and not self.allows(name):
                raise self._refusal(FEATURES[name], use.source)

    def resolve(self, feature: str, wanted: bool | None, source: str = "a setting") -> bool:
        """Returns whether a feature is on: as requested, or the profile's default.

        Raises:
            PolicyError: the feature is requested and refused.
        """
        self.check({feature: Use(wanted, source)})
        return self.profile in FEATURES[feature].on_by_default if wanted is None else wanted

    def check_entry(self, kind: str, name: str, threat: ThreatProfile) -> None:
        """Checks an implementation that was chosen by name from a registry.

        Raises:
            PolicyError: the profile refuses its row.
        """
        row = find_row(threat.row)
        ruling = row.rulings[self.profile]
        if ruling.verdict is Verdict.REFUSED:
            allowing = ", ".join(p for p in Profile if row.rulings[p].verdict is not Verdict.REFUSED)
            raise PolicyError(
                f"{ruling.rule}: the profile {self.profile.value!r} refuses the {kind} {name!r} ({row.name}): "
                f"{ruling.text}. Choose another {kind}, or a profile that allows it: {allowing}."
            )

    def _refusal(self, feature: Feature, source: str) -> PolicyError:
        ruling = feature.rulings[self.profile]
        allowing = ", ".join(feature.allowing())
        return PolicyError(
            f"{ruling.rule}: the profile {self.profile.value!r} refuses {feature.name}, asked for by {source}: "
            f"{ruling.text}. To continue, {feature.instead}; profiles that allow it: {allowing}.",
            param=feature.setting,
        )
