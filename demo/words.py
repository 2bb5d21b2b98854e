"""The word lists, and functions that invent words."""

from __future__ import annotations

from random import Random


def listed(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


NOUNS = listed("""
apple arrow basket beach bell bird blanket boat book bottle bowl box branch bread bridge broom brush
bucket button cake candle carpet castle chair cheese circle clock cloud coat coin corner cotton cup
curtain desk dinner door drawer dress drum engine feather fence field finger fire flag floor flower flute
forest fork garden gate glass glove grass guitar hammer hat hill honey house ice island jacket jar jewel
juice kettle key kitchen kite ladder lake lamp leaf lemon letter light lock map market meadow milk mirror
moon mountain mug nail needle nest net notebook ocean orange oven paint paper path pencil piano picture
pillow plane plate pocket pond potato puzzle quilt radio rain ribbon ring river road rock roof room rope
rose sail salt sand scarf school scissors sea seed shadow shell ship shirt shoe shop shovel silver sky
snow soap sock soup spoon square stage star station stone storm story street string sugar summer sun table
tea tent thread ticket tile tomato tower toy train tray tree trumpet tunnel umbrella valley village wagon
wall watch water wheel whistle wind window winter wood wool yard
""")

ADJECTIVES = listed("""
angry big blue bold brave bright brown busy calm clever cold cool curious dark deep dry dusty early fast
fine funny gentle golden good grand gray great green happy heavy hidden high hot huge hungry kind large
lazy light little lonely long loud lucky merry narrow new nice noisy odd old orange pale pink plain polite
proud purple quick quiet red rich round sad shiny short shy silent silly silver simple sleepy slow small
smooth soft strange strong sunny sweet tall tidy tiny tired warm weak wet white wide wild wise wooden
yellow young
""")

VERBS = listed("""
ask bake bring build buy carry catch clean climb close cook cut dance dig draw drink drive eat find fix
fly follow give grow help hide hold jump keep kick know learn leave lift listen look make meet move open
paint pick plant play pull push read rest ride run sail see sell send shake share show sing sit sleep
speak stand stop swim take talk teach tell think throw touch travel turn visit wait walk wash watch wear
win work write
""")

FILLERS = listed("""
the a of in on under over with and or but near from to by my your his her our their this that some every
no one two three all very here there now then soon always never again only also
""")

NAMES = listed("""
Ada Adam Alan Alice Amir Amy Ana Andrew Anna Arthur Ben Bella Boris Bruno Carl Carla Chen Clara Daniel
David Diana Dora Elena Eli Ella Emil Emma Eric Eva Felix Fiona Frank Fred George Grace Greta Hana Harry
Helen Henry Hugo Ida Igor Ines Iris Ivan Jack James Jane Jim Joan John Julia Karim Kate Kim Laura Lena Leo
Liam Lily Lina Lisa Lucas Lucy Luis Maria Mark Marta Mary Max Maya Mia Mike Mila Mina Nadia Nick Nina Noah
Nora Olga Oliver Omar Oscar Otto Paul Peter Petra Priya Rachel Rita Robert Robin Rosa Ruth Sam Sara Sarah
Simon Sofia Sue Susan Tara Theo Tim Tina Tom Vera Victor Vikram Wei Will Yara Yuki Zoe Alex Chris Bob
Kenji Fatima Ahmed Jose Juan Anya Sven
""")

TOWNS = listed("""
London Paris Berlin Rome Madrid Oslo Vienna Lisbon Dublin Prague Boston Chicago Denver Seattle Toronto
Sydney Tokyo Delhi Cairo Lima Quito Zurich Geneva Athens Warsaw Kyoto Nairobi Leeds York Austin Texas
France Spain India Japan Brazil Canada Norway
""")

CITIES = [
    each.strip()
    for each in """
London, Paris, Berlin, Rome, Madrid, Oslo, Vienna, Lisbon, Dublin, Prague, Boston, Chicago, Denver, Seattle, Toronto,
Sydney, Tokyo, Delhi, Cairo, Lima, Quito, Zurich, Geneva, Athens, Warsaw, Kyoto, Nairobi, Leeds, York, Austin, New York,
San Francisco, Los Angeles, Hong Kong, Rio de Janeiro, Cape Town, Mexico City, Buenos Aires, New Delhi, Tel Aviv, Kuala
Lumpur, San Diego, Las Vegas, St. Louis, Amsterdam, Brussels, Copenhagen, Stockholm, Helsinki, Budapest, Bucharest,
Belgrade, Sofia, Istanbul, Ankara, Moscow, Kyiv, Riga, Vilnius, Tallinn, Hamburg, Munich, Cologne, Frankfurt, Stuttgart,
Dresden, Leipzig, Bern, Basel, Milan, Naples, Turin, Venice, Florence, Barcelona, Valencia, Seville, Porto, Lyon,
Marseille, Nice, Bordeaux, Edinburgh, Glasgow, Manchester, Liverpool, Bristol, Oxford, Cambridge, Cork, Reykjavik,
Houston, Dallas, Miami, Atlanta, Phoenix, Portland, Detroit, Philadelphia, Washington, Montreal, Vancouver, Ottawa,
Havana, Bogota, Caracas, Santiago, Montevideo, Lagos, Accra, Dakar, Tunis, Casablanca, Addis Ababa, Johannesburg,
Dubai, Doha, Riyadh, Tehran, Baghdad, Beirut, Jerusalem, Karachi, Lahore, Mumbai, Bangalore, Chennai, Kolkata, Dhaka,
Bangkok, Hanoi, Jakarta, Manila, Singapore, Taipei, Seoul, Busan, Osaka, Nagoya, Sapporo, Beijing, Shanghai, Shenzhen,
Perth, Melbourne, Brisbane, Auckland, Wellington, Honolulu, Anchorage, Zürich, Bogotá, São Paulo, München, Paris France,
Springfield, Salem, Georgetown, Victoria, Texas, France, Spain, India, Japan, Brazil, Canada, Norway, California
""".replace("\n", " ").split(",")
]

COLOURS = listed("""
red blue green yellow orange purple pink brown black white gray grey silver gold golden teal navy violet
indigo crimson scarlet beige ivory maroon olive turquoise magenta lavender amber lilac mint coral cream
""")

FOODS = listed("""
pizza pasta bread soup cake rice salad cheese chocolate curry noodles pancakes honey apples cherries
tomatoes sushi tacos beans potatoes porridge dumplings strawberries mangoes lasagne ramen burgers chips
waffles stew
""")

ANIMALS = listed("""
fox owl bear wolf mouse rabbit hedgehog cat dog horse duck frog turtle lion tiger elephant monkey sheep
goat squirrel otter badger deer whale dolphin penguin dragon bee butterfly spider snail crow swan goose
pig cow donkey robin sparrow eagle seal crab fish snake lizard parrot kitten puppy hamster beaver mole bat
moose camel panda koala zebra giraffe kangaroo unicorn chicken hen pony
""")

PETS = listed("""
dog cat rabbit hamster parrot horse goldfish turtle pony mouse snake lizard duck goat puppy kitten bird
canary ferret hen pig donkey gecko frog
""")

NUMBER_WORDS = listed("""
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty
""")

KEYS = listed("""
colour food animal number book song game drink fruit town sport flower season day month film band tree
city bird toy word place hobby subject teacher snack cake movie car dish tea dance letter shape planet
country
""")

PLAIN_KEYS = listed("""
job car hobby street street house school boss teacher brother sister mother father friend team boat
password age room birthday office bike team shoe size city town country middle name last name surname
nickname
""")

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnprstvwz"
ONSETS = listed("""
b br c ch cl d dr f fl g gr h j k kr l m n p pr r s sh sk st t th tr v w y z
""")
MIDDLES = listed("""
a e i o u ai ea ee ia io oo
""")
ENDINGS = listed("""
ba bin ca ck da den dor fy ga ka la lan lia lin lo ma mi n na nd nia nne ra ran rick ro rt ry s sa son ta
th to vin x y
""")


def letters(rng: Random) -> str:
    """A string of random letters such as `qwzjk`, which no vocabulary holds."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 8)))


def syllables(rng: Random) -> str:
    """A word that could be one, such as `tomivar`."""
    parts = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3)))
    return "".join(parts) + rng.choice(["", rng.choice(CONSONANTS)])


def invented(rng: Random) -> str:
    """A word that sounds like a name, in small letters."""
    middle = rng.choice(MIDDLES) + (rng.choice(ONSETS) + rng.choice(MIDDLES) if rng.random() < 0.3 else "")
    return rng.choice(ONSETS) + middle + rng.choice(ENDINGS)


def digits(rng: Random) -> str:
    """A number of one to six digits, as text."""
    return str(rng.randrange(10 ** rng.randint(1, 6)))


def english(rng: Random) -> str:
    """A word from the lists."""
    return rng.choice(rng.choice([NOUNS, ADJECTIVES, VERBS, FILLERS, ANIMALS, COLOURS, FOODS]))


def word(rng: Random) -> str:
    """Any word at all: listed, invented, random letters or digits, sometimes with a capital."""
    maker = rng.choices([english, syllables, invented, letters, digits], [45, 15, 15, 20, 5])[0]
    text = maker(rng)
    return text.capitalize() if rng.random() < 0.12 else text


def name(rng: Random) -> str:
    """A first name: half of them ordinary, half invented."""
    return rng.choice(NAMES) if rng.random() < 0.5 else invented(rng).capitalize()


def town(rng: Random) -> str:
    """A place to live in."""
    return rng.choice(TOWNS) if rng.random() < 0.4 else invented(rng).capitalize()


def foreign(rng: Random) -> str:
    """Letters and signs from outside the Latin alphabet, so that raw bytes are copied too."""
    start, end = rng.choice(
        [(0xE0, 0xFF), (0x3B1, 0x3C9), (0x430, 0x44F), (0x3042, 0x3093), (0x4E00, 0x4F00), (0x1F600, 0x1F640)]
    )
    return "".join(chr(rng.randint(start, end)) for _ in range(rng.randint(1, 4)))
