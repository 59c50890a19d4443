"""The measured peak with int8 copies, and the dense model of equal state."""

from sdp.lab.measurements.frozen_copies import compare_peaks, config_of, dense_of, held_by, measured_peak

MODEL = {
    "name": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 16,
    "num_attention_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_dense_model_has_equal_state() -> None:
    _, held = held_by(config_of(MODEL, 1, 4, "int8"), 4)
    _, dense = held_by(config_of(dense_of(MODEL, sum(held) / 4), 1, 4, ""), 4)
    assert abs(dense[0] / (sum(held) / 4) - 1) < 0.01


def test_peaks_are_near_those_of_the_dense_model() -> None:
    ratios = compare_peaks(MODEL, 2, 256, 4, measured_peak)
    assert max(ratios) <= 1.4
    assert sum(ratios) / 4 <= 1.3
