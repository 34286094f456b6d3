# SPDX-License-Identifier: Apache-2.0
"""The queue in Redis, for a service on several machines; each change is one script, which Redis runs alone.

Redis must keep its data: append-only file on, and no eviction. Both are checked when the queue is opened.
"""

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from cosmos_predict2.rl.rewards.service.queue import (
    FAILED,
    STATES,
    Depth,
    Job,
    Limits,
    OtherBody,
    QueueFull,
    Status,
    death_reason,
    now,
)
from imaginaire.errors import ConfigError, missing_package

log = logging.getLogger(__name__)
_JITTER = random.Random()  # of its own: a retry must not move the random state of a training run

_PREFIX = "cosmos_rewards"
_WAIT_S = 60.0  # for a Redis that restarts

# Keys: request:TICKET (hash), body:TICKET, job:TICKET:REWARD (hash), waiting:REWARD and running:REWARD (sorted sets of
# tickets by number and by the end of the lease), settled (sorted set of TICKET:REWARD by time), worker:NAME (set of
# TICKET:REWARD), rewards (set), number, bytes, open (counters).
_COMMON = """
local p = KEYS[1]
local function job_key(ticket, reward) return p .. ':job:' .. ticket .. ':' .. reward end
local function settle(ticket, reward, state, field, text, now)
  local key = job_key(ticket, reward)
  local worker = redis.call('HGET', key, 'worker')
  if worker then redis.call('SREM', p .. ':worker:' .. worker, ticket .. ':' .. reward) end
  redis.call('HDEL', key, 'worker')
  redis.call('HSET', key, 'state', state, field, text, 'settled', now)
  redis.call('ZREM', p .. ':waiting:' .. reward, ticket)
  redis.call('ZREM', p .. ':running:' .. reward, ticket)
  redis.call('ZADD', p .. ':settled', now, ticket .. ':' .. reward)
  redis.call('DECR', p .. ':open')
  if redis.call('HINCRBY', p .. ':request:' .. ticket, 'open', -1) == 0 then
    redis.call('DECRBY', p .. ':bytes', redis.call('HGET', p .. ':request:' .. ticket, 'bytes'))
    redis.call('DEL', p .. ':body:' .. ticket)
  end
end
local function retry(ticket, reward, reason, counts, most, now)
  local key = job_key(ticket, reward)
  local attempt = tonumber(redis.call('HGET', key, 'attempt'))
  if counts and attempt >= most then settle(ticket, reward, 'failed', 'died', reason, now) return end
  if not counts then redis.call('HSET', key, 'attempt', math.max(attempt - 1, 0)) end
  local worker = redis.call('HGET', key, 'worker')
  if worker then redis.call('SREM', p .. ':worker:' .. worker, ticket .. ':' .. reward) end
  redis.call('HDEL', key, 'worker')
  redis.call('HSET', key, 'state', 'queued')
  redis.call('ZREM', p .. ':running:' .. reward, ticket)
  redis.call('ZADD', p .. ':waiting:' .. reward, redis.call('HGET', key, 'number'), ticket)
end
"""
_SCRIPTS = {
    "put": """
local ticket, digest, body, clips, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local request = p .. ':request:' .. ticket
local known = redis.call('HGET', request, 'digest')
if known then
  if known ~= digest then return 'other' end
  local is_expired = false
  for k = 8, #ARGV do
    local state = redis.call('HGET', job_key(ticket, ARGV[k]), 'state')
    if not state or state == 'expired' then is_expired = true end
  end
  if not is_expired or redis.call('HGET', request, 'open') ~= '0' then return 'known' end
end
local jobs = tonumber(redis.call('GET', p .. ':open') or 0)
local bytes = tonumber(redis.call('GET', p .. ':bytes') or 0)
if jobs + #ARGV - 7 > tonumber(ARGV[6]) or bytes + #body > tonumber(ARGV[7]) then return 'full' end
redis.call('DEL', request)
redis.call('HSET', request, 'digest', digest, 'clips', clips, 'bytes', #body, 'open', #ARGV - 7)
redis.call('SET', p .. ':body:' .. ticket, body)
redis.call('INCRBY', p .. ':bytes', #body)
redis.call('INCRBY', p .. ':open', #ARGV - 7)
for k = 8, #ARGV do
  local number = redis.call('INCR', p .. ':number')
  redis.call('DEL', job_key(ticket, ARGV[k]))
  redis.call('HSET', job_key(ticket, ARGV[k]), 'state', 'queued', 'attempt', 0, 'number', number, 'accepted', now)
  redis.call('ZREM', p .. ':settled', ticket .. ':' .. ARGV[k])
  redis.call('ZADD', p .. ':waiting:' .. ARGV[k], number, ticket)
  redis.call('SADD', p .. ':rewards', ARGV[k])
end
return 'new'
""",
    "lease": """
local reward, worker, limit, ends, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', p .. ':running:' .. reward, '-inf', '(' .. now)) do
  retry(ticket, reward, 'its lease ran out', true, tonumber(ARGV[6]), now)
end
local found = {}
for _, ticket in ipairs(redis.call('ZRANGE', p .. ':waiting:' .. reward, 0, limit - 1)) do
  local key = job_key(ticket, reward)
  local has_died = tonumber(redis.call('HGET', key, 'attempt')) > 0
  if not has_died or #found == 0 then
    local attempt = redis.call('HINCRBY', key, 'attempt', 1)
    redis.call('HSET', key, 'state', 'running', 'worker', worker)
    redis.call('ZREM', p .. ':waiting:' .. reward, ticket)
    redis.call('ZADD', p .. ':running:' .. reward, ends, ticket)
    redis.call('SADD', p .. ':worker:' .. worker, ticket .. ':' .. reward)
    found[#found + 1] = ticket
    found[#found + 1] = attempt
  end
  if has_died then break end
end
return found
""",
    "renew": """
for k = 3, #ARGV do
  local ticket, reward = string.match(ARGV[k], '^([^:]+):(.*)$')
  if redis.call('HGET', job_key(ticket, reward), 'worker') == ARGV[1] then
    redis.call('ZADD', p .. ':running:' .. reward, 'XX', ARGV[2], ticket)
  end
end
""",
    "settle": """
local ticket, reward, worker, attempt = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = job_key(ticket, reward)
local held = redis.call('HMGET', key, 'state', 'worker', 'attempt')
if held[1] ~= 'running' or held[2] ~= worker or held[3] ~= attempt then return 0 end
settle(ticket, reward, ARGV[5], ARGV[6], ARGV[7], ARGV[8])
return 1
""",
    "release": """
local jobs = redis.call('SMEMBERS', p .. ':worker:' .. ARGV[1])
for _, job in ipairs(jobs) do
  local ticket, reward = string.match(job, '^([^:]+):(.*)$')
  retry(ticket, reward, ARGV[2], ARGV[3] == '1', tonumber(ARGV[4]), ARGV[5])
end
redis.call('DEL', p .. ':worker:' .. ARGV[1])
return #jobs
""",
    "fail_waiting": """
local tickets = redis.call('ZRANGE', p .. ':waiting:' .. ARGV[1], 0, -1)
for _, ticket in ipairs(tickets) do settle(ticket, ARGV[1], 'failed', 'error', ARGV[2], ARGV[3]) end
return #tickets
""",
    "purge": """
local old = redis.call('ZRANGEBYSCORE', p .. ':settled', '-inf', '(' .. ARGV[1])
for _, job in ipairs(old) do
  local ticket, reward = string.match(job, '^([^:]+):(.*)$')
  local key = job_key(ticket, reward)
  redis.call('HSET', key, 'state', 'expired')
  redis.call('HDEL', key, 'result', 'error')
  redis.call('EXPIRE', key, ARGV[2])
  redis.call('EXPIRE', p .. ':request:' .. ticket, ARGV[2])
  redis.call('ZREM', p .. ':settled', job)
end
return #old
""",
}


class RedisQueue:
    """`Queue` at the address ``url``, which may carry a user and a password."""

    def __init__(self, url: str, limits: Limits, prefix: str = _PREFIX) -> None:
        try:
            import redis
        except ImportError as error:
            raise missing_package("redis", "reward") from error
        self.limits = limits
        self.prefix = prefix
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

    def put(self, ticket: str, rewards: Sequence[str], body: bytes, digest: str, num_clips: int) -> bool:
        most = (self.limits.max_jobs, self.limits.max_bytes)
        answer = self._run("put", ticket, digest, body, num_clips, now(), *most, *rewards)
        if answer == b"other":
            raise OtherBody("This request id was used before, with another body.")
        if answer == b"full":
            raise QueueFull("the limit of waiting jobs or bytes is reached.")
        return bool(answer == b"new")

    def lease(self, reward: str, worker: str, limit: int, seconds: float) -> list[Job]:
        found = self._run("lease", reward, worker, limit, now() + seconds, now(), self.limits.max_attempts)
        jobs = []
        for ticket, attempt in zip(found[::2], found[1::2]):
            body = self._call("get", self._key("body", ticket.decode()))
            jobs.append(Job(ticket.decode(), reward, int(attempt), body))
        return jobs

    def renew(self, jobs: Sequence[Job], worker: str, seconds: float) -> None:
        self._run("renew", worker, now() + seconds, *(f"{job.ticket}:{job.reward}" for job in jobs))

    def finish(self, job: Job, worker: str, result: str) -> bool:
        return bool(self._run("settle", job.ticket, job.reward, worker, job.attempt, "done", "result", result, now()))

    def fail(self, job: Job, worker: str, reason: str) -> bool:
        return bool(self._run("settle", job.ticket, job.reward, worker, job.attempt, FAILED, "error", reason, now()))

    def release(self, worker: str, reason: str, counts: bool) -> int:
        return int(self._run("release", worker, reason, int(counts), self.limits.max_attempts, now()))

    def fail_waiting(self, reward: str, reason: str) -> int:
        return int(self._run("fail_waiting", reward, reason, now()))

    def look(self, ticket: str, reward: str) -> Status | None:
        fields = ("state", "result", "error", "died", "attempt")
        found = self._call("hmget", self._key("job", ticket, reward), *fields)
        state, result, error, died, attempt = [None if one is None else one.decode() for one in found]
        if state is None:
            return None
        clips = self._call("hget", self._key("request", ticket), "clips")
        if died is not None:
            error = death_reason(int(attempt or 0), died)
        return Status(state, result, error, int(clips or 0))

    def settled(self, waiting: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
        pairs = list(waiting)

        def states() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            for ticket, reward in pairs:
                pipe.hget(self._key("job", ticket, reward), "state")
            return list(pipe.execute())

        found = self._asked(states) if pairs else []
        return [pair for pair, state in zip(pairs, found) if state not in (b"queued", b"running")]

    def depth(self) -> dict[str, Depth]:
        found = {}
        for reward in sorted(name.decode() for name in self._call("smembers", self._key("rewards"))):
            counts = dict.fromkeys(STATES, 0)
            oldest = 0.0
            for state in ("waiting", "running"):
                key = self._key(state, reward)
                counts["queued" if state == "waiting" else state] = self._call("zcard", key)
                for ticket in self._call("zrange", key, 0, 0):
                    job = self._key("job", ticket.decode(), reward)
                    accepted = self._call("hget", job, "accepted")
                    oldest = max(oldest, now() - float(accepted or now()))
            found[reward] = Depth(counts, oldest)
        return found

    def purge(self) -> int:
        ttl = self.limits.result_ttl_s
        return int(self._run("purge", now() - ttl, max(1, round(ttl))))

    def recover(self) -> int:
        return 0  # other machines may be scoring: leases that end give out again what nobody scores

    def close(self) -> None:
        self._redis.close()

    def _key(self, *parts: str) -> str:
        return ":".join((self.prefix, *parts))

    def _run(self, name: str, *arguments: Any) -> Any:
        return self._asked(lambda: self._scripts[name](keys=[self.prefix], args=arguments))

    def _call(self, command: str, *arguments: Any) -> Any:
        return self._asked(lambda: getattr(self._redis, command)(*arguments))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """The answer, also of a Redis that restarts meanwhile: every script may be run twice."""
        began = time.monotonic()
        while True:
            try:
                return ask()
            except self._gone as error:
                if time.monotonic() - began > _WAIT_S:
                    raise
                log.warning("Redis does not answer, asking again: %s", error)
                time.sleep(_JITTER.uniform(0.1, 0.5))

    def _check_settings(self) -> None:
        import redis

        try:
            found = self._redis.config_get("appendonly", "maxmemory-policy")
        except redis.ResponseError:  # a hosted Redis that does not show its settings
            log.warning("Redis does not show its settings: it must persist (appendonly yes) and never evict")
            return
        if found.get("maxmemory-policy", "noeviction") != "noeviction":
            raise ConfigError(
                f"Redis evicts keys (maxmemory-policy {found['maxmemory-policy']}), so requests would be lost. "
                "Set: redis-cli config set maxmemory-policy noeviction"
            )
        if found.get("appendonly") != "yes":
            log.warning("Redis keeps no append-only file: what waits is lost with it. redis-server --appendonly yes")
