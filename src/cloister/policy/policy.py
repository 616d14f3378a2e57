"""The rules of the active profile, and the only place that refuses features. Pure: data in, verdicts out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cloister.policy.features import FEATURES, Feature
from cloister.policy.matrix import Entry, find_row, row_of
from cloister.policy.verdict import Profile, Ruling, Verdict
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.scope import ScopeKind


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
        for refusal in self.refusals(features):
            raise refusal

    def refusals(self, features: Mapping[str, Use]) -> Iterator[PolicyError]:
        """Yields a refusal, as `check` raises it, for each feature that is wanted and refused."""
        for name, use in features.items():
            if use.wanted and not self.allows(name):
                yield self._refusal(FEATURES[name], use.source)

    def is_default(self, feature: str) -> bool:
        """Returns whether a feature is on where no setting says it."""
        return self.profile in FEATURES[feature].on_by_default

    def entry_refusals(self, entry: Entry, setting: str) -> Iterator[PolicyError]:
        """Yields a refusal if the profile refuses the row of an implementation, which `setting` chose from a registry."""
        row = find_row(entry.threat.row)
        ruling = row.rulings[self.profile]
        if ruling.verdict is Verdict.REFUSED:
            allowing = ", ".join(p for p in Profile if row.rulings[p].verdict is not Verdict.REFUSED)
            yield PolicyError(
                f"{ruling.rule}: the profile {self.profile.value!r} refuses the {entry.kind} {entry.name!r} ({row.name}): "
                f"{ruling.text}. Choose another {entry.kind}, or a profile that allows it: {allowing}.",
                param=setting,
            )

    def _refusal(self, feature: Feature, source: str) -> PolicyError:
        ruling = feature.rulings[self.profile]
        allowing = ", ".join(feature.allowing())
        return PolicyError(
            f"{ruling.rule}: the profile {self.profile.value!r} refuses {feature.name}, asked for by {source}: "
            f"{ruling.text}. To continue, {feature.instead}; profiles that allow it: {allowing}.",
            param=feature.setting,
        )
