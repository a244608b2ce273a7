"""The arguments of `headrace doctor`."""

from __future__ import annotations

import argparse


def add_doctor(doctor: argparse.ArgumentParser) -> None:
    """Add what is no setting."""
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--before",
        action="store_true",
        help="this machine and its settings alone: no stack runs yet",
    )
    doctor.add_argument(
        "--no-probe", action="store_true", help="send no request: look, and move no blocks"
    )
    doctor.add_argument(
        "--tenant", default="", help="whose requests the probes are (gateway.tenant)"
    )
