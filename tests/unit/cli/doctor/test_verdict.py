"""What the doctor concludes from its probes."""

import math

import pytest

from headrace.cli.doctor import verdict
from headrace.cli.doctor.probe import Length, Run, by_length, lengths_of
from headrace.shared.messages import Heartbeat, Timings
from headrace.shared.subjects import Role

NUM_BYTES = 1_000  # a token ID


def length(num, *, prefill_s, moved_s, kv_s=None):
    """A prompt that took `prefill_s` to compute, and `moved_s` beside that."""
    return Length(
        num_token_ids=num,
        prefill_s=prefill_s,
        kv_s=kv_s or moved_s / 2,
        kv_bytes=num * NUM_BYTES,
        first_token_s=0.010 + prefill_s + moved_s + 0.005,
        way_s=moved_s / 4,
        first_step_s=moved_s * 3 / 4 + 0.005,
        step_s=0.005,
    )


def engine(role, *, blocks=10_000, max_model_len=40_000):
    return Heartbeat(
        role=role,
        instance=str(role),
        model="m",
        contract="c",
        state="ready",
        slots=1,
        num_running=0,
        kv_blocks_total=blocks,
        max_model_len=max_model_len,
    )


def run(num, **fields):
    workers = {"prefill": "p1", "decode": "d1"}
    known = {"prefill_mode": "remote", "kv_transfer_s": 0.01, "kv_transfer_bytes": 1_000_000}
    timings = Timings(workers=workers, **(known | fields))
    return Run(num_token_ids=num, timings=timings)


def test_what_a_prompt_cost_beside_its_computation():
    assert length(1024, prefill_s=0.5, moved_s=0.04).moved_s == pytest.approx(0.04)


def test_the_threshold_is_where_computing_begins_to_cost_more():
    # computing: 0.1 ms a token ID; moving: 50 ms and 0.01 ms a token ID → equal at 556
    lengths = [
        length(num, prefill_s=num * 1e-4, moved_s=0.05 + num * 1e-5) for num in (256, 1024, 8192)
    ]
    judged = verdict.judge(lengths)
    assert judged.threshold == 576
    assert "pays here from about 576" in judged.sentence
    assert judged.gigabytes_per_s == pytest.approx(8192 * NUM_BYTES / ((0.05 + 8192e-5) / 2) / 1e9)


def test_where_the_shortest_prompt_pays_already_shorter_ones_are_not_judged():
    judged = verdict.judge([length(n, prefill_s=n * 1e-3, moved_s=0.01) for n in (128, 1024)])
    assert judged.threshold == 128
    assert "at the latest 128" in judged.sentence
    for configured, status in ((0, "ok"), (128, "ok"), (256, "ok"), (1024, "warn")):
        assert verdict.threshold_fits(judged, configured).status == status


def test_where_moving_always_costs_more_it_does_not_pay():
    judged = verdict.judge([length(n, prefill_s=n * 1e-6, moved_s=0.1) for n in (256, 1024)])
    assert judged.threshold is None
    assert "does not pay" in judged.sentence
    assert verdict.threshold_fits(judged, 256).status == "warn"


@pytest.mark.parametrize(
    ("configured", "status"),
    [(576, "ok"), (300, "ok"), (1000, "ok"), (0, "warn"), (4096, "warn"), (math.inf, "warn")],
)
def test_whether_the_configured_threshold_fits(configured, status):
    lengths = [length(n, prefill_s=n * 1e-4, moved_s=0.05 + n * 1e-5) for n in (256, 1024, 8192)]
    assert verdict.threshold_fits(verdict.judge(lengths), configured).status == status


def test_lengths_that_were_not_measured_are_drawn_on_and_marked():
    lengths = [length(n, prefill_s=n * 1e-4, moved_s=n * 1e-5) for n in (1024, 8188)]
    rows = {row.num_token_ids: row for row in verdict.judge(lengths).rows}
    assert {num: row.is_measured for num, row in rows.items()} == {
        1024: True,
        8188: True,  # so near to 8,192 that it stands for it
        32768: False,
    }
    assert rows[32768].kv_bytes == 32768 * NUM_BYTES
    assert rows[32768].prefill_s == pytest.approx(3.2768)


def test_one_length_alone_is_drawn_on_in_proportion():
    judged = verdict.judge([length(1024, prefill_s=0.1, moved_s=0.01)])
    assert judged.rows[-1].prefill_s == pytest.approx(3.2)


def test_a_transfer_that_is_much_of_the_first_token_says_what_to_change():
    for moved_s, status in ((0.01, "ok"), (0.9, "warn")):
        lengths = [length(1024, prefill_s=0.5, moved_s=moved_s)]
        finding = verdict.transfer(lengths, verdict.judge(lengths))
        assert finding.status == status
    assert finding.setting.startswith("model.block_size")


def test_pairs_that_moved_nothing_are_named():
    finding = verdict.pairs([run(1024)], {("p1", "d1"), ("p2", "d1")})
    assert (finding.status, "p2 → d1" in finding.found) == ("warn", True)
    assert verdict.pairs([run(1024)], {("p1", "d1")}).status == "ok"


def test_medians_are_of_remote_prefills_that_moved_blocks():
    runs = [
        *(run(1024, prefill_s=s) for s in (0.1, 0.2, 0.9)),
        run(1024, prefill_mode="local", prefill_s=None),
        run(2048, kv_transfer_s=None, kv_transfer_bytes=None),
    ]
    (found,) = by_length(runs)
    assert (found.num_token_ids, found.prefill_s) == (1024, 0.2)


@pytest.mark.parametrize(
    ("blocks", "max_model_len", "expected"),
    [
        (10_000, 40_000, [128, 512, 1024, 8192, 32768]),
        (10_000, 8192, [128, 512, 1024, 8188]),
        (10, 8192, [128, 512, 636]),
        (1, 8192, []),
    ],
)
def test_probes_fit_the_context_and_the_cache(blocks, max_model_len, expected):
    beats = [engine(Role.PREFILL), engine(Role.DECODE, blocks=blocks, max_model_len=max_model_len)]
    assert lengths_of(beats, 128) == expected
