"""`headrace doctor`: checks this machine, then the stack that runs, if one does."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console

from headrace.cli.dlq.run import print_line
from headrace.cli.doctor import probe, verdict
from headrace.cli.doctor.broker import check_broker
from headrace.cli.doctor.finding import Finding, fail, skip
from headrace.cli.doctor.machine import check_machine
from headrace.cli.doctor.plan import check_plan
from headrace.cli.doctor.view import PLAIN_WIDTH, show, show_verdict
from headrace.cli.doctor.workers import check_workers
from headrace.cli.operator_link import connected
from headrace.client import Client
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Heartbeat
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

ROLL_CALL_S = 1.0  # for every worker to answer, also one that is busy


class Report(msgspec.Struct, kw_only=True):
    """Everything: what `--json` prints."""

    machine: list[Finding] = []
    broker: list[Finding] = []
    models: dict[str, list[Finding]] = {}
    transfers: dict[str, verdict.Verdict] = {}

    @property
    def findings(self) -> list[Finding]:
        """Every finding."""
        return [*self.machine, *self.broker, *(f for some in self.models.values() for f in some)]


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Print the report; return 1 when a check failed."""
    if options.before:
        report = before(settings)
    else:
        report = asyncio.run(examine(settings, tenant=options.tenant, move=not options.no_probe))
    if options.json:
        print_line(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _print(report)
    return 1 if any(finding.status == "fail" for finding in report.findings) else 0


def before(settings: Settings) -> Report:
    """Run the checks that need no stack."""
    return Report(machine=[*check_machine(settings.up.engine), *check_plan(settings)])


async def examine(settings: Settings, *, tenant: str = "", move: bool = True) -> Report:
    """Run every check; `move`: move blocks too, in requests of `tenant` (empty: that of `gateway.tenant`)."""
    report = before(settings)
    try:
        async with connected(settings.broker) as broker:
            report.broker = await check_broker(broker)
            await _examine_models(report, settings, broker, tenant, move)
    except BrokerError as error:
        right = "a stack that runs; --before checks the rest without one"
        report.broker.append(fail("broker", str(error), right, "broker.url"))
    return report


async def _examine_models(
    report: Report, settings: Settings, broker: Broker, tenant: str, move: bool
) -> None:
    async with WorkerTable(broker) as table:
        await asyncio.sleep(ROLL_CALL_S)
        models = {name: beats for name, beats in table.models().items() if name}
        if not models:
            report.broker.append(
                fail(
                    "workers", "none says that it is there", "workers on this broker", "broker.url"
                )
            )
        for name, beats in sorted(models.items()):
            report.models[name] = check_workers(beats, table.clock_offset)
            if move:
                report.models[name] += await _move(report, settings, name, beats, tenant)


async def _move(
    report: Report, settings: Settings, model: str, beats: Sequence[Heartbeat], tenant: str
) -> list[Finding]:
    """Move blocks between the workers of one model, and judge."""
    if any(f.status == "fail" and f.name == "stages" for f in report.models[model]):
        return [skip("kv-transfer", "no request can be answered")]
    expected = {
        (prefill.instance, decode.instance)
        for prefill in beats
        for decode in beats
        if (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        and prefill.contract == decode.contract
        and prefill.state == decode.state == "ready"
        and not decode.is_colocated
    }
    if not expected:
        return [skip("kv-transfer", "no prefill worker that a decode worker can share with")]
    lengths = probe.lengths_of(beats, settings.model.block_size)
    if not lengths:
        return [skip("kv-transfer", "the KV caches are too small to be measured")]
    broker = settings.broker
    if broker.password and not broker.user:
        broker = msgspec.structs.replace(broker, user="admin")
    try:
        async with Client(broker, tenant=tenant or settings.gateway.tenant) as client:
            runs = await probe.probe(client, model, lengths, len(expected))
    except probe.ProbeError as error:
        return [fail("kv-transfer", str(error), "an answer", "the workers' logs say more")]
    measured = list(probe.by_length(runs))
    if not measured:
        return [
            fail(
                "kv-transfer",
                f"decode computed all of {len(runs)} prompts itself, of up to {lengths[-1]} token IDs",
                "a prefill worker for the longest",
                "decode.local_prefill_threshold; the log of decode says why",
            )
        ]
    judged = report.transfers[model] = verdict.judge(measured)
    return [
        verdict.transfer(measured, judged),
        verdict.pairs(runs, expected),
        verdict.threshold_fits(judged, settings.decode.local_prefill_threshold),
    ]


def _print(report: Report) -> None:
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(width=width, highlight=False)
    show(console, "THIS MACHINE AND ITS SETTINGS", report.machine)
    if report.broker:
        show(console, "BROKER", report.broker)
    for model, findings in report.models.items():
        show(console, f"MODEL {model}", findings)
        if model in report.transfers:
            show_verdict(console, report.transfers[model])
