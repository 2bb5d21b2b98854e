-- Adds a background request to the index, by when its lease expires. KEYS: the index. ARGV: request id, lease (ms), time to live (s).
local time = redis.call('TIME')
local expires = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
redis.call('ZADD', KEYS[1], string.format('%.0f', expires), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
