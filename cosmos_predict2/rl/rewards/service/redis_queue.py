# SPDX-License-Identifier: Apache-2.0
"""The queue in Redis, for a service on several machines; each change is one script, which Redis runs alone.

Redis must keep its data: append-only file on, and no eviction. Both are checked when the queue is opened.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmos_predict2.rl.rewards.service import queue
from cosmos_predict2.rl.rewards.service.queue import Depth, Job, Limits, QueueUnusable
from imaginaire.errors import ConfigError, optional_module

log = logging.getLogger(__name__)
_JITTER = random.Random()  # of its own: a retry must not move the random state of a training run

_PREFIX = "cosmos_rewards"
_WAIT_S = 60.0  # for a Redis that restarts

# Keys: request:TICKET (hash), body:TICKET, job:TICKET:REWARD (hash), waiting:REWARD (sorted set of tickets by number,
# that of a suspect negative), running:REWARD (by the end of the lease), settled (sorted set of TICKET:REWARD by time),
# rewards (set), number, bytes, open (counters).
_FIRST = -(2**52)  # plus its number: a suspect's place among those that wait
_COMMON = f"""
local p = KEYS[1]
local time = redis.call('TIME')  -- of Redis: the machines' clocks may differ
local now = time[1] + time[2] / 1000000
local function job_key(ticket, reward) return p .. ':job:' .. ticket .. ':' .. reward end
local function settle(ticket, reward, state, field, text)
  redis.call('ZREM', p .. ':running:' .. reward, ticket)
  redis.call('HSET', job_key(ticket, reward), 'state', state, field, text, 'settled', now)
  redis.call('ZADD', p .. ':settled', now, ticket .. ':' .. reward)
  redis.call('DECR', p .. ':open')
  if redis.call('HINCRBY', p .. ':request:' .. ticket, 'open', -1) == 0 then
    redis.call('DECRBY', p .. ':bytes', redis.call('HGET', p .. ':request:' .. ticket, 'bytes'))
    redis.call('DEL', p .. ':body:' .. ticket)
  end
end
local function retry(ticket, reward, reason, has_died, most)
  local key = job_key(ticket, reward)
  local deaths = redis.call('HINCRBY', key, 'deaths', has_died)
  if deaths >= most then settle(ticket, reward, 'failed', 'died', reason) return end
  redis.call('ZREM', p .. ':running:' .. reward, ticket)
  redis.call('HSET', key, 'state', 'queued')
  local place = redis.call('HGET', key, 'number') + (deaths > 0 and {_FIRST} or 0)
  redis.call('ZADD', p .. ':waiting:' .. reward, place, ticket)
end
"""
_SCRIPTS = {
    "put": """
local ticket, digest, body, clips = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local request = p .. ':request:' .. ticket
local known = redis.call('HGET', request, 'digest')
if known and known ~= digest then return 'other' end
local wanted = {}
for k = 7, #ARGV, 2 do
  local found = redis.call('HMGET', job_key(ticket, ARGV[k]), 'state', 'version')
  local is_good = found[1] == 'queued' or found[1] == 'running' or (found[1] == 'done' and found[2] == ARGV[k + 1])
  if not is_good then wanted[#wanted + 1] = ARGV[k] end
end
if #wanted == 0 then return 'known' end
local jobs = tonumber(redis.call('GET', p .. ':open') or 0)
local bytes = tonumber(redis.call('GET', p .. ':bytes') or 0)
if jobs + #wanted > tonumber(ARGV[5]) or bytes + #body > tonumber(ARGV[6]) then return 'full' end
if redis.call('EXISTS', p .. ':body:' .. ticket) == 0 then redis.call('INCRBY', p .. ':bytes', #body) end
redis.call('HSET', request, 'digest', digest, 'clips', clips, 'bytes', #body)
redis.call('HINCRBY', request, 'open', #wanted)
redis.call('SET', p .. ':body:' .. ticket, body)
redis.call('INCRBY', p .. ':open', #wanted)
for _, reward in ipairs(wanted) do
  local number = redis.call('INCR', p .. ':number')
  if redis.call('DEL', job_key(ticket, reward)) == 0 then redis.call('HINCRBY', request, 'jobs', 1) end
  redis.call('HSET', job_key(ticket, reward), 'state', 'queued', 'attempt', 0, 'number', number, 'accepted', now)
  redis.call('ZREM', p .. ':settled', ticket .. ':' .. reward)
  redis.call('ZADD', p .. ':waiting:' .. reward, number, ticket)
  redis.call('SADD', p .. ':rewards', reward)
end
return 'new'
""",
    "lease": """
local reward, worker, limit, seconds, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local waiting = p .. ':waiting:' .. reward
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', p .. ':running:' .. reward, '-inf', '(' .. now)) do
  retry(ticket, reward, '', 0, most)
end
local tickets = redis.call('ZRANGEBYSCORE', waiting, '-inf', '(0', 'LIMIT', 0, 1)
if #tickets == 0 then tickets = redis.call('ZRANGEBYSCORE', waiting, 0, '+inf', 'LIMIT', 0, limit) end
local found = {}
for _, ticket in ipairs(tickets) do
  local key = job_key(ticket, reward)
  redis.call('ZREM', waiting, ticket)
  redis.call('HSET', key, 'state', 'running', 'worker', worker)
  redis.call('ZADD', p .. ':running:' .. reward, now + seconds, ticket)
  for _, one in ipairs({ticket, redis.call('HINCRBY', key, 'attempt', 1)}) do found[#found + 1] = one end
end
return found
""",
    "renew": """
for k = 3, #ARGV do
  local ticket, reward = string.match(ARGV[k], '^([^:]+):(.*)$')
  if redis.call('HGET', job_key(ticket, reward), 'worker') == ARGV[1] then
    redis.call('ZADD', p .. ':running:' .. reward, 'XX', now + tonumber(ARGV[2]), ticket)
  end
end
""",
    "settle": """
local ticket, reward, worker, attempt = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = job_key(ticket, reward)
local held = redis.call('HMGET', key, 'state', 'worker', 'attempt')
if held[1] ~= 'running' or held[2] ~= worker or held[3] ~= attempt then return 0 end
redis.call('HSET', key, 'version', ARGV[8])
settle(ticket, reward, ARGV[5], ARGV[6], ARGV[7])
return 1
""",
    "release": """
local number = 0
for _, ticket in ipairs(redis.call('ZRANGE', p .. ':running:' .. ARGV[1], 0, -1)) do
  if redis.call('HGET', job_key(ticket, ARGV[1]), 'worker') == ARGV[2] then
    retry(ticket, ARGV[1], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]))
    number = number + 1
  end
end
return number
""",
    "purge": """
local old = redis.call('ZRANGEBYSCORE', p .. ':settled', '-inf', '(' .. now - tonumber(ARGV[1]))
for _, job in ipairs(old) do
  local ticket, reward = string.match(job, '^([^:]+):(.*)$')
  redis.call('DEL', job_key(ticket, reward))
  redis.call('ZREM', p .. ':settled', job)
  local request = p .. ':request:' .. ticket
  if redis.call('HINCRBY', request, 'jobs', -1) == 0 then redis.call('DEL', request) end
end
return #old
""",
}


class RedisQueue:
    """`Queue` at the address ``url``, which may carry a user and a password."""

    def __init__(self, url: str, limits: Limits) -> None:
        redis = optional_module("redis", "reward")
        self.limits = limits
        self._refused = redis.ResponseError
        self._gone = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError)
        try:
            self._redis: Any = redis.Redis.from_url(url, socket_timeout=30, socket_connect_timeout=5)
            self._redis.ping()
            self._check_settings()
        except (redis.RedisError, ValueError) as error:
            place = url.rpartition("@")[2]  # without the password
            raise ConfigError(
                f"The queue at {place} does not answer: {error}. Start redis-server, or correct --queue."
            ) from error
        self._scripts = {name: self._redis.register_script(_COMMON + text) for name, text in _SCRIPTS.items()}

    def put(self, ticket: str, rewards: Mapping[str, str], body: bytes, digest: str, num_clips: int) -> bool:
        most = (self.limits.max_jobs, self.limits.max_bytes)
        pairs = [text for pair in rewards.items() for text in pair]
        answer = self._run("put", ticket, digest, body, num_clips, *most, *pairs)
        if answer == b"other":
            raise queue.OtherBody
        if answer == b"full":
            raise queue.QueueFull("the limit of waiting jobs or bytes is reached.")
        return bool(answer == b"new")

    def lease(self, reward: str, worker: str, limit: int, seconds: float) -> list[Job]:
        found = self._run("lease", reward, worker, limit, seconds, self.limits.max_attempts)
        jobs = []
        for ticket, attempt in zip(found[::2], found[1::2]):
            body = self._call("get", self._key("body", ticket.decode()))
            jobs.append(Job(ticket.decode(), reward, int(attempt), body))
        return jobs

    def renew(self, jobs: Sequence[Job], worker: str, seconds: float) -> None:
        self._run("renew", worker, seconds, *(f"{job.ticket}:{job.reward}" for job in jobs))

    def finish(self, job: Job, worker: str, result: str, version: str) -> bool:
        return bool(self._run("settle", job.ticket, job.reward, worker, job.attempt, "done", "result", result, version))

    def fail(self, job: Job, worker: str, reason: str) -> bool:
        return bool(self._run("settle", job.ticket, job.reward, worker, job.attempt, "failed", "error", reason, ""))

    def release(self, reward: str, worker: str, reason: str, has_died: bool) -> int:
        return int(self._run("release", reward, worker, reason, int(has_died), self.limits.max_attempts))

    def look(self, ticket: str, reward: str) -> queue.Status | None:
        fields = ("state", "result", "error", "died", "deaths")
        found = self._call("hmget", self._key("job", ticket, reward), *fields)
        state, result, error, died, deaths = [None if one is None else one.decode() for one in found]
        if state is None:
            return None
        clips = self._call("hget", self._key("request", ticket), "clips")
        if died is not None:
            error = queue.death_reason(int(deaths or 0), died)
        return queue.Status(state, result, error, int(clips or 0))

    def depth(self) -> dict[str, Depth]:
        found = {}
        seconds, millionths = self._asked(self._redis.time)
        for reward in sorted(name.decode() for name in self._call("smembers", self._key("rewards"))):
            counts = dict.fromkeys(queue.STATES, 0)
            pipe = self._redis.pipeline(transaction=False)
            for name, state in dict(waiting="queued", running="running").items():
                tickets = self._call("zrange", self._key(name, reward), 0, -1)
                counts[state] = len(tickets)
                for ticket in tickets:
                    pipe.hget(self._key("job", ticket.decode(), reward), "accepted")
            accepted = [float(one) for one in self._asked(pipe.execute) if one is not None]
            oldest = seconds + millionths / 1e6 - min(accepted) if accepted else 0.0
            found[reward] = Depth(counts, oldest)
        return found

    def fault(self) -> str:
        try:
            self._redis.set(self._key("trial"), "x", ex=1)
        except self._gone as error:
            return f"Redis does not answer: {error}"
        except self._refused as error:
            return f"Redis refused a change: {error}"
        return ""

    def purge(self) -> int:
        return int(self._run("purge", self.limits.result_ttl_s))

    def recover(self) -> int:
        return 0  # other machines may be scoring: leases that end give out again what nobody scores

    def close(self) -> None:
        self._redis.close()

    def _key(self, *parts: str) -> str:
        return ":".join((_PREFIX, *parts))

    def _run(self, name: str, *arguments: Any) -> Any:
        return self._asked(lambda: self._scripts[name](keys=[_PREFIX], args=arguments))

    def _call(self, command: str, *arguments: Any) -> Any:
        return self._asked(lambda: getattr(self._redis, command)(*arguments))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """The answer, also of a Redis that restarts meanwhile: every script may be run twice."""
        began = time.monotonic()
        while True:
            try:
                return ask()
            except self._refused as error:  # its memory or its disk is full, or it is a replica
                raise QueueUnusable(f"Redis refused a change: {error}") from error
            except self._gone as error:
                if time.monotonic() - began > _WAIT_S:
                    raise QueueUnusable(f"Redis does not answer: {error}") from error
                log.warning("Redis does not answer, asking again: %s", error)
                time.sleep(_JITTER.uniform(0.1, 0.5))

    def _check_settings(self) -> None:
        try:
            found = self._redis.config_get("appendonly", "maxmemory-policy")
        except self._refused:  # a hosted Redis that does not show its settings
            log.warning("Redis does not show its settings: it must persist (appendonly yes) and never evict")
            return
        if found.get("maxmemory-policy", "noeviction") != "noeviction":
            raise ConfigError(
                f"Redis evicts keys (maxmemory-policy {found['maxmemory-policy']}), so requests would be lost. "
                "Set: redis-cli config set maxmemory-policy noeviction"
            )
        if found.get("appendonly") != "yes":
            log.warning("Redis keeps no append-only file: what waits is lost with it. redis-server --appendonly yes")
