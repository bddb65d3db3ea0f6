"""The same requests at the same moments, to any server of OpenAI's API: bundled prompts of two categories, greedy.

    python benchmarks/traffic.py http://localhost:8000 --seconds 60 --gap 0.8

It prints when each answer was complete, as JSON lines. Two runs with one seed send the same, so that a journal that is
replayed without speculation can be held against the server started with --drafter none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import httpx

from forerun.workloads import load


async def send(client: httpx.AsyncClient, started: float, at: float, category: str, prompt: str, tokens: int) -> None:
    """One request at its moment."""
    await asyncio.sleep(max(started + at - time.monotonic(), 0))
    sent = time.monotonic()
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body, headers={"x-forerun-category": category})
    answer.raise_for_status()
    used = answer.json()["usage"]["completion_tokens"]
    line = {"at": round(sent - started, 3), "category": category, "tokens": used, "seconds": time.monotonic() - sent}
    print(json.dumps(line), flush=True)


async def main() -> None:
    """Send all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which requests are sent")
    parser.add_argument("--gap", type=float, default=0.8, help="mean seconds between two requests")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    prompts = {name: [case.prompt for case in load(name) if case.prompt] for name in ("code", "copying")}
    at, sends = 0.0, []
    async with httpx.AsyncClient(base_url=given.url, timeout=600) as client:
        started = time.monotonic()
        while (at := at + draw.expovariate(1 / given.gap)) < given.seconds:
            category = draw.choice(sorted(prompts))
            sends.append(send(client, started, at, category, draw.choice(prompts[category]), draw.randint(16, 128)))
        await asyncio.gather(*sends)


if __name__ == "__main__":
    asyncio.run(main())
