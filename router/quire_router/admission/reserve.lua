-- Takes in one request of a tenant if every limit allows it. A bucket is the time at which it will be full again. A
-- request that is in progress already has its place. After ``clock.lua``.
-- ARGV: request, cost of a request and of its tokens (us; 0: no such limit), a full bucket (us), most in progress (-1:
-- any number), lease of a request (us).
-- Returns whether it was taken in and whether with a place that it did not have before, both debts (us until full) as
-- they are now, and how many are in progress.
local window, lease = tonumber(ARGV[4]), tonumber(ARGV[6])
local costs, debts, fits = {tonumber(ARGV[2]), tonumber(ARGV[3])}, {}, true

local function store(i)
  redis.call('SET', KEYS[i], digits(now + debts[i]), 'PX', math.ceil(debts[i] / 1000))
  keep_clock(debts[i])
end

for i = 1, 2 do
  debts[i] = math.max(0, (tonumber(redis.call('GET', KEYS[i]) or 0) or 0) - now)
  if debts[i] > window then -- no bucket is longer empty: the clock went back, and how far is not known any more
    debts[i] = window
    store(i)
  end
  fits = fits and (costs[i] == 0 or debts[i] + costs[i] <= window)
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', digits(now))
local leased = digits(now + lease)
for _, request in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. leased, '+inf')) do
  redis.call('ZADD', KEYS[3], leased, request) -- no lease is longer
end
local running, most = redis.call('ZCARD', KEYS[3]), tonumber(ARGV[5])
local placed = most >= 0 and not redis.call('ZSCORE', KEYS[3], ARGV[1])
if not fits or (placed and running >= most) then
  return {0, 0, debts[1], debts[2], running}
end
for i = 1, 2 do
  if costs[i] > 0 then
    debts[i] = debts[i] + costs[i]
    store(i)
  end
end
if most >= 0 then
  redis.call('ZADD', KEYS[3], leased, ARGV[1])
  redis.call('PEXPIRE', KEYS[3], math.ceil(lease / 1000))
  keep_clock(lease)
end
return {1, placed and 1 or 0, debts[1], debts[2], running + (placed and 1 or 0)}
