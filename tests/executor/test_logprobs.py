"""Log-probabilities against a float64 reference, and their independence of the other rows."""

import numpy as np
import pytest

from cloister.executor.logprobs import token_logprobs


def reference(logits):
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("vocab_size", [7, 1003, 151_669])
def test_they_are_the_log_softmax(vocab_size):
    logits = (np.random.default_rng(0).standard_normal((9, vocab_size)) * 5).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, vocab_size, 9)
    num_top = np.array([0, 1, 2, 3, 5, 20, 0, 20, 4])
    expected = reference(logits)
    for row, entry in enumerate(token_logprobs(logits, tokens, num_top)):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(expected[row, tokens[row]], abs=2e-5)
        order = np.argsort(-logits[row], kind="stable")[: num_top[row]]
        assert [token for token, _ in entry.top] == order.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[row, order].tolist(), abs=2e-5)


def test_equal_tokens_are_listed_by_lower_id():
    logits = np.zeros((2, 50), np.float32)
    logits[1, 40] = 1.0
    first, second = token_logprobs(logits, np.array([3, 3]), np.array([4, 3]))
    assert [token for token, _ in first.top] == [0, 1, 2, 3]
    assert [token for token, _ in second.top] == [40, 0, 1]


def test_a_row_has_the_same_bits_alone_and_among_64():
    logits = (np.random.default_rng(4).standard_normal((64, 5001)) * 5).astype(np.float32)
    tokens = np.arange(64)
    num_top = np.arange(64) % 21
    together = token_logprobs(logits, tokens, num_top)
    for i in range(64):
        row = slice(i, i + 1)
        assert token_logprobs(logits[row].copy(), tokens[row], num_top[row]) == [together[i]]
