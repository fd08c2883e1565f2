"""What Redis does where activators lease a replica's slots: it divides them as `policy/slot_parts.part_of` says.

A hash of what each member has of each replica of a version, how many it needs and wants beside those, and until when.
In: our name, for how many seconds, how long a turn is; of each replica its name, its slots, what we keep, what is
needed, what is wanted ahead. Out: of each how many may be taken from here. A replica's name says where its turns begin,
so that they are nobody's everywhere at once.
"""

from typing import Final

LEASE: Final = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[2] * 1000)) -- takes no memory, so that a full Redis goes on
local of = {}
local all = redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
  local replica, member = string.match(all[at], '^(%S+) (%S+)$')
  local have, need, ahead, ends = string.match(all[at + 1], '^(%d+) (%d+) (%d+) (%S+)$')
  if tonumber(ends) <= now then
    redis.call('HDEL', KEYS[1], all[at])
  elseif member ~= ARGV[1] then
    of[replica] = of[replica] or {}
    table.insert(of[replica], {member, tonumber(have), tonumber(need), tonumber(ahead)})
  end
end
local function level(slots, every, row, turn)
  local wants, own = {}, 0
  for _, one in ipairs(every) do
    table.insert(wants, one[row])
    if one[1] == ARGV[1] then own = one[row] end
  end
  table.sort(wants)
  local left, many = slots, #wants
  for _, want in ipairs(wants) do
    if want * many > left then break end
    left = left - want
    many = many - 1
  end
  if many == 0 or own <= math.floor(left / many) then return own end
  local least, above, me = math.floor(left / many), 0, 0
  for _, one in ipairs(every) do
    if one[row] > least then
      if one[1] == ARGV[1] then me = above end
      above = above + 1
    end
  end
  if (me + turn) % above < left - least * many then return least + 1 end
  return least
end
local out = {}
for at = 4, #ARGV, 5 do
  local slots, keep = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local need, ahead = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local every = of[ARGV[at]] or {}
  local turn = math.floor(now / ARGV[3])
  for byte = 1, #ARGV[at] do turn = turn + string.byte(ARGV[at], byte) end
  local free, left = slots, slots - need
  for _, one in ipairs(every) do
    free = free - one[2]
    left = left - one[3]
  end
  table.insert(every, {ARGV[1], 0, need, ahead})
  table.sort(every, function(a, b) return a[1] < b[1] end)
  local part = level(slots, every, 3, turn)
  if left > 0 then part = part + level(left, every, 4, turn) end
  local may = math.max(0, math.min(part, free))
  local have = math.max(keep, may)
  local name = ARGV[at] .. ' ' .. ARGV[1]
  if have > 0 or need > 0 then
    redis.call('HSET', KEYS[1], name, string.format('%d %d %d %.6f', have, need, ahead, now + ARGV[2]))
  else
    redis.call('HDEL', KEYS[1], name)
  end
  table.insert(out, may)
end
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[2] * 1000))
return out
"""
