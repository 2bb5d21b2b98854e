-- Keeps requests in progress, and puts back those that Redis lost. After ``clock.lua``. ARGV: lease (us), requests.
local expires = digits(now + ARGV[1])
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[3], expires, ARGV[i])
end
redis.call('PEXPIRE', KEYS[3], math.ceil(ARGV[1] / 1000))
keep_clock(ARGV[1])
return 1
