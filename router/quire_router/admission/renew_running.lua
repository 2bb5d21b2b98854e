-- Keeps requests in progress, and puts back those that Redis lost.
-- KEYS: running. ARGV: lease (us), requests.
local time = redis.call('TIME')
local expires = string.format('%.0f', time[1] * 1000000 + time[2] + ARGV[1])
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], expires, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[1] / 1000))
return 1
