"""Submits three questions, walks away, and fetches the answers later; then streams a fourth.

    python submit.py nats://127.0.0.1:4222 smollm2-135m-instruct

Needs headrace itself: pip install headrace.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from headrace.client import Client, Part

QUESTIONS = [
    "What is the capital of Japan?",
    "What is the capital of Germany?",
    "How many days are in a week?",
]


def chat(model: str, question: str, **more: Any) -> dict[str, Any]:
    """Return the body that one would send to /v1/chat/completions."""
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 64, **more}


async def main(url: str, model: str) -> None:
    async with Client(url) as client:
        # Accepted when `submit` returns; nothing is lost if this process ends now.
        request_ids = [await client.submit(chat(model, question)) for question in QUESTIONS]

    async with Client(url) as client:  # perhaps in another process, and tomorrow
        for question, request_id in zip(QUESTIONS, request_ids, strict=True):
            result = await client.result(request_id)
            if result.is_ok:
                print(question, "→", result.json()["choices"][0]["message"]["content"])
            else:
                print(question, "→", result.status, result.error)

        request_id = await client.submit(chat(model, "Count to ten.", stream=True), lane="rt")
        async for part in client.stream(request_id):
            if isinstance(part, Part):
                for chunk in part.json():
                    for choice in chunk["choices"]:
                        print(choice["delta"].get("content") or "", end="", flush=True)
            else:
                print(f"\n({part.status})")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
