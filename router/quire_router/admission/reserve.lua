-- Takes in one request of a tenant if every limit allows it. A bucket is the time at which it will be full again. A
-- request that is in progress already has its place.
-- KEYS: requests, tokens, running. ARGV: request, cost of a request and of its tokens (us; 0: no such limit), a full
-- bucket (us), most in progress (-1: any number), lease of a request (us).
-- Returns whether it was taken in and whether with a place that it did not have before, both debts (us until full) as
-- they are now, and how many are in progress.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local window = tonumber(ARGV[4])
local costs, debts, fits = {tonumber(ARGV[2]), tonumber(ARGV[3])}, {}, true
for i = 1, 2 do
  -- No bucket is longer empty than a window: what says so was written by a clock that was ahead, or is no number.
  debts[i] = math.min(window, math.max(0, (tonumber(redis.call('GET', KEYS[i]) or 0) or 0) - now))
  fits = fits and (costs[i] == 0 or debts[i] + costs[i] <= window)
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now))
local leased = string.format('%.0f', now + ARGV[6])
for _, request in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. leased, '+inf')) do
  redis.call('ZADD', KEYS[3], leased, request) -- by a clock that was ahead, too
end
local running, most = redis.call('ZCARD', KEYS[3]), tonumber(ARGV[5])
local placed = most >= 0 and not redis.call('ZSCORE', KEYS[3], ARGV[1])
if not fits or (placed and running >= most) then
  return {0, 0, debts[1], debts[2], running}
end
for i = 1, 2 do
  if costs[i] > 0 then
    debts[i] = debts[i] + costs[i]
    redis.call('SET', KEYS[i], string.format('%.0f', now + debts[i]), 'PX', math.ceil(debts[i] / 1000))
  end
end
if most >= 0 then
  redis.call('ZADD', KEYS[3], leased, ARGV[1])
  redis.call('PEXPIRE', KEYS[3], math.ceil(ARGV[6] / 1000))
end
return {1, placed and 1 or 0, debts[1], debts[2], running + (placed and 1 or 0)}
