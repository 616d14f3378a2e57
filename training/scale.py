"""How big the models are and how long each stage runs: the figures of the recipe in one place."""

from dataclasses import dataclass

from cloister.train.decoder import Shape
from training.distil import Distilling
from training.pretrain import Phase
from training.tune import Tuning


@dataclass(frozen=True)
class Scale:
    """Every figure of a run."""

    model: Shape
    draft: Shape
    pretrain: tuple[Phase, ...]
    pretrain_rate: float
    tune: Tuning
    retune: Tuning
    retuned_share: float
    """How much of the weights is what retuning made of them, the rest being those before it (`averaging.py`)."""
    distil: Distilling
    redistil: Distilling
    """How an exported draft learns what changed in the model."""
    checkpoint_every: int
    num_questions: int
    """How many questions measure each skill and each sort of unknown name."""
    draft_rows: int
    """How many rows of 512 tokens measure the draft."""
    num_asked: int
    """How many questions the model answers for its heads to learn from."""
    compiled: bool
    """Whether torch compiles the layers: four times as fast, and a C++ compiler is needed."""


FULL = Scale(
    model=Shape(4096, hidden=256, intermediate=688, num_layers=6, num_heads=8, num_kv_heads=2, head_dim=32),
    draft=Shape(4096, hidden=96, intermediate=256, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=32),
    pretrain=(Phase(750, 64, 256), Phase(40, 16, 1024), Phase(10, 2, 8192)),
    pretrain_rate=4e-3,
    tune=Tuning(700, chat_rows=18, chat_length=384, corpus_length=1024, corpus_weight=0.3, rate=3e-3),
    retune=Tuning(340, chat_rows=18, chat_length=384, corpus_length=2048, corpus_weight=0.6, rate=1.6e-3, decay=0.8),
    retuned_share=0.85,
    distil=Distilling(300, corpus_rows=10, chat_rows=10, length=384, rate=6e-3),
    redistil=Distilling(150, corpus_rows=10, chat_rows=10, length=384, rate=4e-3),
    checkpoint_every=50,
    num_questions=300,
    draft_rows=64,
    num_asked=12_000,
    compiled=True,
)

TINY = Scale(
    model=Shape(512, hidden=32, intermediate=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16),
    draft=Shape(512, hidden=16, intermediate=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16),
    pretrain=(Phase(6, 4, 32), Phase(2, 1, 64)),
    pretrain_rate=4e-3,
    tune=Tuning(6, chat_rows=4, chat_length=768, corpus_length=64, corpus_weight=0.3, rate=4e-3),
    retune=Tuning(6, chat_rows=4, chat_length=768, corpus_length=64, corpus_weight=0.3, rate=2e-3),
    retuned_share=0.85,
    distil=Distilling(6, corpus_rows=2, chat_rows=2, length=64, rate=6e-3),
    redistil=Distilling(6, corpus_rows=2, chat_rows=2, length=64, rate=6e-3),
    checkpoint_every=4,
    num_questions=4,
    draft_rows=2,
    num_asked=20,
    compiled=False,
)

SCALES = {"full": FULL, "tiny": TINY}
