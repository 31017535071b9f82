"""SAMSA's study on sequences: what rows change, in which modes they are tested, what a figure reads."""

import torch

from sparseattn.samsa.models import EqualScores, inference_modes, sampling_layers
from sparseattn.studies.samsa_lra import LENGTH, METHODS, ROWS, STUDY

SETTING = STUDY.at("smoke")


def test_rows_sample_the_paper_s_share_of_their_sequences(data, built):
    for row, options in ROWS.items():
        if "samples" in options:
            layer = sampling_layers(built(row))[0]
            share = options["samples"] / LENGTH[options["task"]]
            assert layer.samples == max(2, round(share * data[options["task"]]["_sizes"][2]))
            assert layer.hard == options.get("hard", True)


def test_rows_start_and_are_tested_as_they_say(built):
    modes = {name: inference_modes(built(f"image: {name}")) for name in METHODS}
    assert modes["hard 256"] == ["top-k", "noise"] and modes["soft 256"] == ["mixed", "top-k", "noise"]
    assert not any(modes[name] for name in ("random 256", "full", "no attention", "Performer"))
    assert isinstance(sampling_layers(built("text: random 256"))[0].importance, EqualScores)
    assert [built(f"text: hard 256{more}").network.encoder.alpha for more in ("", ", from 0")] == [1, 0]


def test_a_network_reads_nothing_behind_the_end(data, built):
    net, (inputs, labels) = built("listops: full"), data["listops"]["test"]
    tokens = inputs["tokens"].clone()
    for row, length in zip(tokens, inputs["lengths"], strict=True):
        row[length:] = 3
    assert net(tokens, inputs["lengths"]).equal(net(**inputs)) and len(labels) == len(tokens)


def test_every_mode_is_scored_and_told(data, built):
    net = built("image: soft 256")
    found = STUDY.test(net, SETTING, data)
    assert list(found) == ["test", "top-k", "noise"] and {len(y) for y in found.values()} == {16}
    with torch.no_grad():
        told = STUDY.drawn("image: soft 256", net, SETTING, data)
    assert set(told) == {"multiplier", "supports, mixed", "supports, top-k", "supports, noise"}
