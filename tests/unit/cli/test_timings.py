from __future__ import annotations

from headrace.cli import timings
from headrace.shared.messages import Timings

REMOTE = Timings(
    render_queue_s=0.001,
    render_s=0.0042,
    decode_queue_s=0.002,
    prefill_mode="remote",
    prefill_queue_s=0.003,
    prefill_s=1.25,
    kv_transfer_s=0.0071,
    kv_transfer_bytes=22_118_400,
    first_token_s=1.5,
    decode_s=2.0,
    derender_s=0.004,
    total_s=3.6,
    num_prompt_token_ids=412,
    num_cached_token_ids=411,
    num_output_token_ids=41,
    workers={"prefill": "prefill-a", "decode": "decode-b"},
)


def test_the_table_shows_every_stage_with_its_unit() -> None:
    assert timings.table(REMOTE).splitlines() == [
        "queue            6.0 ms  render 1.0 ms, decode 2.0 ms, prefill 3.0 ms",
        "render           4.2 ms  412 token IDs (prompt)",
        "prefill          1.25 s  remote, 411 token IDs (not computed by decode)",
        "KV transfer      7.1 ms  22.1 MB",
        "first token      1.50 s  from acceptance",
        "decode           2.00 s  41 token IDs (answer), 20.0 tokens/s",
        "derender         4.0 ms  CPU time",
        "total            3.60 s",
    ]


def test_what_was_not_measured_is_a_dash_and_not_a_zero() -> None:
    assert [line.split()[-1] for line in timings.table(Timings()).splitlines()] == [
        *("-", "-", "-", "-", "acceptance", "-", "time", "-")
    ]


def test_a_remote_prefill_names_both_workers() -> None:
    assert timings.where_prefilled(REMOTE) == (
        "The prefill was remote: prefill-a computed the prompt, decode-b pulled its KV cache."
    )


def test_a_local_prefill_is_not_called_remote() -> None:
    line = timings.where_prefilled(Timings(prefill_mode="local", workers={"decode": "decode-b"}))
    assert line == "The prefill was local: decode-b computed the prompt itself."


def test_a_single_token_has_no_speed() -> None:
    assert timings.tokens_per_second(Timings(num_output_token_ids=1, decode_s=0.1)) is None
