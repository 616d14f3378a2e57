"""An encoder as data: a transformer that reads a whole text in both directions and writes none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cloister.backends.spec import Activation, DecoderSpec

ClassifierActivation = Literal["tanh"] | Activation


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """Scores of classes: out(norm(act(dense(x)))), where x is pooled from a text's hidden states.

    Canonical names: `classifier_dense.weight [hidden, hidden]`, `classifier_norm.weight [hidden]`, `classifier.weight
    [num_labels, hidden]`, and `.bias` beside those that have one; that of `classifier` always is there.

    Attributes:
        pooling: "cls" takes the first token's hidden state, "mean" the mean over all tokens.
        activation: after `classifier_dense`.
        dense_bias: `classifier_dense` carries a bias.
        norm: whether there is a norm; it is of the same kind as the encoder's others.
    """

    num_labels: int
    pooling: Literal["cls", "mean"] = "cls"
    activation: ClassifierActivation = "tanh"
    dense_bias: bool = True
    norm: bool = False


@dataclass(frozen=True, slots=True)
class EncoderSpec(DecoderSpec):
    """A transformer whose queries see keys on both sides: all of them, or those in (p - window, p + window).

    Layers are those of a decoder, with grouped-query attention and one feed-forward. There is no head for tokens. Beside the
    names of a decoder (`backends.base`) there are `embed_norm.weight [hidden]`, a norm of the embeddings, which every encoder
    has, and `token_types.weight [num_token_types, hidden]`. `norm` is there only with `final_norm`.

    Attributes:
        num_token_types: a learned vector for the type of each token is added to its embedding (BERT, Devlin et al. 2019: 0 in
            the first text of a pair, 1 in the second); 0 for none. A greater type counts as the last.
        residual_norm: norms come after residual sums: x = attention_norm(x + attention(x)), x = mlp_norm(x + mlp(x)) (Vaswani
            et al. 2017); else before attention and feed-forward.
        first_norm: the first layer has a norm before its attention too; False where the norm of embeddings does (ModernBERT).
        final_norm: hidden states are normalised after the last layer.
        classifier: what scores classes; None for a model whose hidden states are its result.
    """

    num_token_types: int = 0
    residual_norm: bool = False
    first_norm: bool = True
    final_norm: bool = False
    classifier: ClassifierSpec | None = None
