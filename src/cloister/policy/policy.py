"""What the active profile allows, and the one place that refuses. Pure: data in, verdicts out."""

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
    """Somebody's wish for a feature.

    Attributes:
        wanted: on, off, or None when nobody said.
        source: where the wish comes from, for the refusal, such as "flag"; never what a user sent.
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
    """The rules of one profile. Nothing that it refuses can be switched on, by whatever way the wish came.

    Raises:
        ConfigError: there is no such profile.
    """

    def __init__(self, profile: str) -> None:
        if profile not in tuple(Profile):
            raise ConfigError(f"profile must be one of: {', '.join(Profile)}", param="profile")
        self.profile = Profile(profile)

    def __repr__(self) -> str:
        return f"Policy({self.profile.value!r})"

    @property
    def widest_scope(self) -> ScopeKind:
        """The widest circle in which KV may be reused."""
        return _WIDEST_SCOPE[self.profile]

    @property
    def names_tenants(self) -> bool:
        """Whether the engine may learn which tenant a request belongs to, and not its class alone."""
        return self.widest_scope is not ScopeKind.REQUEST

    @property
    def counts_only(self) -> bool:
        """Whether metrics leave through a `CountRelease` and not as they are."""
        return row_of("profiling").rulings[self.profile].verdict is not Verdict.ALLOWED

    def ruling(self, feature: str) -> Ruling:
        """Returns what the profile says of a feature in `FEATURES` (KeyError when there is none)."""
        return FEATURES[feature].rulings[self.profile]

    def allows(self, feature: str) -> bool:
        return self.ruling(feature).verdict is not Verdict.REFUSED

    def check(self, features: Mapping[str, Use]) -> None:
        """Checks wishes by feature name.

        Raises:
            PolicyError: one is wanted and refused; the message names the rule and says what to change.
        """
        for name, use in features.items():
            if use.wanted and not self.allows(name):
                raise self._refusal(FEATURES[name], use.source)

    def resolve(self, feature: str, wanted: bool | None, source: str = "a setting") -> bool:
        """Returns whether a feature is on: as wanted, or as the profile has it when nobody said.

        Raises:
            PolicyError: it is wanted and refused.
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
            f"{ruling.text}. To go on, {feature.instead}; profiles that allow it: {allowing}.",
            param=feature.setting,
        )
