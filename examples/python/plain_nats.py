"""Submits a question without headrace's client: with nats-py, and msgspec for msgpack.

    python plain_nats.py nats://127.0.0.1:4222 smollm2-135m-instruct "What is the capital of Japan?"

What goes over the wire is in docs/asyncapi.yaml.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import uuid
from hashlib import blake2b
from typing import Any

import msgspec
import nats
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

TENANT = "default"


def model_token(model: str) -> str:
    """Return the token of a served model name in subjects."""
    token = re.sub(r"[^a-z0-9_-]+", "-", model.lower()).strip("-")
    if token == model and len(token) <= 64:
        return token
    return f"{token[:64].strip('-')}-{blake2b(model.encode(), digest_size=3).hexdigest()}"


async def main(url: str, model: str, question: str) -> None:
    connection = await nats.connect(url)
    stream = connection.jetstream()
    request_id = uuid.uuid4().hex
    result = f"hr.v1.res.{TENANT}.{request_id}"

    # Listen first, and look at what is stored afterwards: so the result can't fall between the two.
    came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def receive(message: Msg) -> None:
        if not came.done():
            came.set_result(message.data)

    await connection.subscribe(result, cb=receive)

    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 64}
    ack = await stream.publish(
        f"hr.v1.req.{TENANT}.{model_token(model)}.std",
        json.dumps(body).encode(),
        headers={"Nats-Msg-Id": f"{TENANT}.{request_id}", "Hr-Request-Id": request_id},
    )
    print("accepted" + (", and it was before" if ack.duplicate else ""))

    payload = await stored(stream, result)
    if payload is None:
        payload = await asyncio.wait_for(came, 600)
    terminal: dict[str, Any] = msgspec.msgpack.decode(payload)
    answer = json.loads(terminal["body"])
    if terminal["status"] == "ok":
        print(answer["choices"][0]["message"]["content"])
    else:
        print(terminal["status"], answer["error"]["message"])
    await connection.close()


async def stored(stream: JetStreamContext, subject: str) -> bytes | None:
    """Return the result that is stored already. After a reconnect, ask again: what was live is lost."""
    try:
        message = await stream.get_last_msg("HR_RES", subject, direct=True)
    except NotFoundError:
        return None
    return bytes(message.data or b"")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
