"""The scores as a picture, and two answers as a relay sees them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Bench
from benchmarks.traffic.captures import Capture
from benchmarks.traffic.classifiers import Score
from benchmarks.traffic.fingerprint import Share
from benchmarks.traffic.prompts import CLASSES
from cloister.bench.plots import COLOURS, GREY, draw


def plot_scores(bench: Bench, options: argparse.Namespace, scores: Mapping[tuple[str, str], Score]) -> None:
    """Draws each score with its interval; 0.5 is what a coin gets."""
    parts = list(dict.fromkeys(part for part, _ in scores))
    classifiers = list(dict.fromkeys(classifier for _, classifier in scores))
    with draw(bench.picture(options), bench.title, size=(8.0, 4.2)) as (axes,):
        axes.axhline(0.5, color=GREY, linestyle="--", linewidth=1)
        axes.axhline(0.55, color=GREY, linestyle=":", linewidth=1)
        for number, classifier in enumerate(classifiers):
            found = [scores[part, classifier] for part in parts]
            places = [place + 0.18 * (number - (len(classifiers) - 1) / 2) for place in range(len(parts))]
            spans = [[max(0.0, s.auc - s.low) for s in found], [max(0.0, s.high - s.auc) for s in found]]
            label = {"trees": "boosted trees", "network": "convolutional network"}[classifier]
            axes.errorbar(places, [s.auc for s in found], spans, fmt="o", capsize=4, color=COLOURS[number], label=label)
        axes.set_xticks(range(len(parts)), parts)
        axes.set_ylim(0.4, 1.02)
        axes.set_ylabel("area under the ROC curve")
        axes.legend(loc="upper right")


def plot_streams(target: Path, streams: Mapping[str, Sequence[Capture]]) -> None:
    """Draws the chunks of one answer of each class under each profile: size over time."""
    with draw(target, "Two answers as a relay sees them", 1, len(streams), size=(4.6, 3.4)) as panels:
        for axes, (profile, captures) in zip(panels, streams.items(), strict=True):
            for capture, colour in zip(captures, COLOURS, strict=False):
                milliseconds = [time_s * 1e3 for time_s in capture.times_s]
                axes.plot(milliseconds, capture.sizes, ".", color=colour, markersize=3, label=CLASSES[capture.label])
            axes.set_title(profile)
            axes.set_ylim(0, 640)
            axes.set_xlabel("since the request, ms")
            axes.set_ylabel("size of the chunk, bytes")
            axes.legend(loc="lower right")


def plot_shares(bench: Bench, options: argparse.Namespace, shares: Mapping[tuple[str, str], Share], chance: float) -> None:
    """Draws how often the prompt was found, for each way to serve and each thing that is looked at."""
    parts = list(dict.fromkeys(part for part, _ in shares))
    views = list(dict.fromkeys(view for _, view in shares))
    with draw(bench.picture(options), bench.title, size=(9.0, 4.6)) as (axes,):
        axes.axhline(chance, color=GREY, linestyle="--", linewidth=1, label=f"chance, {chance:.0%}")
        for number, view in enumerate(views):
            places = [place for place, part in enumerate(parts) if (part, view) in shares]
            found = [shares[parts[place], view] for place in places]
            spans = [[max(0.0, s.share - s.bounds[0]) for s in found], [max(0.0, s.bounds[1] - s.share) for s in found]]
            shifted = [place + 0.18 * (number - (len(views) - 1) / 2) for place in places]
            axes.errorbar(shifted, [s.share for s in found], spans, fmt="o", capsize=4, color=COLOURS[number], label=view)
        axes.set_xticks(range(len(parts)), [part.replace(", ", "\n") for part in parts])
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share of answers whose prompt was found")
        axes.legend(loc="center right")
