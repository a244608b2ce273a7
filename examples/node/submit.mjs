// Submits a question over NATS, and waits for its result.
//
//   npm install
//   node submit.mjs nats://127.0.0.1:4222 smollm2-135m-instruct "What is the capital of Japan?"
//
// What goes over the wire is in docs/asyncapi.yaml.

import { randomUUID } from "node:crypto";
import { decode } from "@msgpack/msgpack";
import { jetstream, jetstreamManager } from "@nats-io/jetstream";
import { connect, headers } from "@nats-io/transport-node";
import { blake2b } from "@noble/hashes/blake2.js";

const TENANT = "default";
const TIMEOUT_MS = 600_000;

/** The token of a served model name in subjects. */
export function modelToken(model) {
  const trim = (text) => text.replace(/^-+|-+$/g, "");
  const token = trim(model.toLowerCase().replace(/[^a-z0-9_-]+/g, "-"));
  if (token === model && token.length <= 64) return token;
  const digest = blake2b(new TextEncoder().encode(model), { dkLen: 3 });
  return `${trim(token.slice(0, 64))}-${Buffer.from(digest).toString("hex")}`;
}

async function main([url, model, question]) {
  const connection = await connect({ servers: url });
  const requestId = randomUUID();
  const result = `hr.v1.res.${TENANT}.${requestId}`;

  // Listen first, and look at what is stored afterwards: so the result can't fall between the two.
  const live = connection.subscribe(result, { max: 1, timeout: TIMEOUT_MS });
  const came = (async () => {
    for await (const message of live) return message.data;
  })();
  await connection.flush();

  const head = headers();
  head.set("Nats-Msg-Id", `${TENANT}.${requestId}`);
  head.set("Hr-Request-Id", requestId);
  const messages = [{ role: "user", content: question }];
  const body = { model, messages, temperature: 0, max_tokens: 64 };
  const subject = `hr.v1.req.${TENANT}.${modelToken(model)}.std`;
  const ack = await jetstream(connection).publish(subject, JSON.stringify(body), { headers: head });
  console.log(ack.duplicate ? "accepted, and it was before" : "accepted");

  // After a reconnect, ask again: what was live is lost.
  const manager = await jetstreamManager(connection, { checkAPI: false });
  const stored = await manager.direct.getMessage("HR_RES", { last_by_subj: result });
  const terminal = decode(stored?.data ?? (await came));
  const answer = JSON.parse(new TextDecoder().decode(terminal.body));
  console.log(
    terminal.status === "ok"
      ? answer.choices[0].message.content
      : `${terminal.status} ${answer.error.message}`,
  );
  await connection.close();
}

if (import.meta.filename === process.argv[1]) await main(process.argv.slice(2));
