"""The scores as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from benchmarks.harness import Bench
from benchmarks.traffic.classifiers import Score
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
