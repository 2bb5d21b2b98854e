"""How people say things: the phrasings from which the corpus builds what users write.

`{a}` and the like are holes, filled by the corpus; the answers are in the corpus too.
"""

from __future__ import annotations


def variants(text: str) -> list[str]:
    """The phrasings in a text that separates them by bars; line ends mean nothing."""
    return [" ".join(item.split()) for item in text.split("|")]


SYSTEM_LINES = variants("""
You are a helpful assistant. | You are a friendly assistant. | You are the Quire demo model. | Answer
briefly. | Be polite and answer in one sentence. | You are a kind teacher who helps children. | You are a
helpful, honest and careful assistant. Keep your answers short. | Speak plain English. | You answer
questions. | You are a pirate.
""")
ADDITIONS = variants("""
What is {a} + {b} | {a} + {b} | {a}+{b} | {a} + {b} = | {a} plus {b} | What is {a} plus {b} | What's {a} +
{b} | What's {a} plus {b} | How much is {a} plus {b} | How much is {a} + {b} | Add {a} and {b} | Please
add {a} and {b} | Add {a} to {b} | Can you add {a} and {b} | What is the sum of {a} and {b} | The sum of
{a} and {b} | Compute {a} + {b} | Calculate {a} + {b} | And {a} + {b} | Tell me {a} + {b} | What do you
get when you add {a} and {b} | {a} and {b} make | What does {a} + {b} equal | Please tell me what {a} +
{b} is | What is {a}+{b} | I have {a} apples and get {b} more. How many do I have | If I have {a} coins
and find {b} more, how many coins do I have | Can you tell me what {a} plus {b} is | Now {a} + {b} | Hi,
what is {a} + {b} | Could you work out {a} plus {b} | Solve {a} + {b} | What is {a} and {b} together | How
many is {a} plus {b} | Do you know what {a} + {b} is
""")
SUBTRACTIONS = variants("""
What is {a} - {b} | {a} - {b} | {a}-{b} | {a} - {b} = | {a} minus {b} | What is {a} minus {b} | What's {a}
- {b} | What's {a} minus {b} | How much is {a} minus {b} | How much is {a} - {b} | Subtract {b} from {a} |
Take {b} from {a} | Please subtract {b} from {a} | Take {b} away from {a} | {a} take away {b} | What is
the difference of {a} and {b} | Compute {a} - {b} | Calculate {a} - {b} | And {a} - {b} | Tell me {a} -
{b} | What does {a} - {b} equal | What is {a}-{b} | Please tell me what {a} - {b} is | Can you tell me
what {a} minus {b} is | Now {a} - {b} | Hi, what is {a} - {b} | I have {a} apples and eat {b}. How many do
I have | If I have {a} coins and lose {b}, how many are left | Can you subtract {b} from {a} | Could you
work out {a} minus {b} | Solve {a} - {b} | Do you know what {a} - {b} is
""")
BEYOND = variants("""
What is {a} times {b} | {a} * {b} | {a} x {b} | What is {a} * {b} | Multiply {a} by {b} | {a} divided by
{b} | {a} / {b} | What is {a} divided by {b} | Divide {a} by {b} | What is the square root of {a} | What's
{a} times {b} | How much is {a} times {b}
""")
COUNTS = variants("""
Count from {a} to {b} | Please count from {a} to {b} | Can you count from {a} to {b} | Count {a} to {b} |
Now count from {a} to {b} | Count from {a} up to {b} | Count the numbers from {a} to {b} | List the
numbers from {a} to {b} | Could you count from {a} to {b} | Start at {a} and count to {b} | Write the
numbers from {a} to {b} | Say the numbers from {a} to {b} | Count for me from {a} to {b}
""")
COUNTS_DOWN = variants("""
Count down from {a} to {b} | Count backwards from {a} to {b} | Count from {a} down to {b} | Count from {a}
to {b} | Please count down from {a} to {b} | Can you count backwards from {a} to {b}
""")
COUNTS_TO = variants("""
Count to {b} | Please count to {b} | Can you count to {b} | Count up to {b} | Count for me to {b} | Could
you count to {b}
""")
REPEATS = variants("""
Repeat: {p} | Repeat {p} | Repeat after me: {p} | Say {p} | Say: {p} | Please say {p} | Please say: {p} |
Please repeat: {p} | Please repeat {p} | Repeat this: {p} | Repeat the words {p} | Repeat these words: {p}
| Can you repeat {p} | Can you say {p} | Echo {p} | Copy this: {p} | Say the words: {p} | Repeat this
sentence: {p} | Repeat back to me: {p} | Now repeat {p} | Now say {p} | Please copy these words: {p} | Say
after me: {p} | Repeat the following: {p} | Repeat exactly: {p} | Could you repeat this: {p} | Repeat the
list: {p} | Just say {p} | Echo: {p} | I want you to say {p} | Repeat the phrase {p} | Please repeat after
me: {p} | Please repeat this list: {p} | Repeat my words: {p} | Can you repeat this: {p}
""")
TELL_NAME = variants("""
My name is {v} | I am {v} | I'm {v} | Call me {v} | You can call me {v} | Hi, I am {v} | Hello, my name is
{v} | Hi, my name is {v} | Hi! My name is {v} | Hello! I'm {v} | Hi, I'm {v} | Please call me {v} | My
name's {v} | My first name is {v} | Hello, I am {v} | They call me {v} | Remember that my name is {v} |
Please remember my name: {v} | People call me {v} | Good morning, my name is {v} | Hey, I'm {v} | My name
is now {v} | Hello there, my name is {v}
""")
ASK_NAME = variants("""
What is my name | What's my name | Do you remember my name | Do you know my name | Who am I | Tell me my
name | Whats my name | What am I called | What did I say my name was | Please tell me my name | Can you
tell me my name | What name did I give you | And my name | Now tell me my name | Can you remember my name
| So what is my name | Do you still know my name | Do you know who I am | What is my first name | Remind
me what my name is
""")
TELL_KEY = variants("""
My {k} is {v} | My {k} is {v} | My {k} is {v} | Remember that my {k} is {v} | Please remember: my {k} is
{v} | My {k} is now {v} | Please remember that my {k} is {v} | By the way, my {k} is {v} | Also, my {k} is
{v} | You should know that my {k} is {v} | And my {k} is {v} | I want you to know that my {k} is {v} |
Note that my {k} is {v}
""")
ASK_KEY = variants("""
What is my {k} | What is my {k} | What's my {k} | Do you remember my {k} | Do you know my {k} | Tell me my
{k} | And my {k} | What did I say my {k} was | Please tell me my {k} | Can you tell me my {k} | Do you
still know my {k} | Whats my {k} | Now what is my {k} | Remind me what my {k} is | So what is my {k} |
What was my {k} | Can you remember my {k} | Do you know what my {k} is
""")
TELL_TOWN = variants("""
I live in {v} | I live in {v} now | My home is in {v} | I am living in {v} | I now live in {v}
""")
ASK_TOWN = variants("""
Where do I live | What town do I live in | Do you remember where I live | Which city do I live in | Do you
know where I live | Tell me where I live | In which town do I live | Where is my home
""")
TELL_AGE = variants("""
I am {v} years old | I'm {v} years old | My age is {v} | I am {v} years old now | I just turned {v}
""")
ASK_AGE = variants("""
How old am I | What is my age | Do you know how old I am | Do you remember how old I am | What's my age
""")
TELL_PET = variants("""
I have a {k} called {v} | I have a {k} named {v} | My {k} is called {v} | My {k} is named {v} | My pet is
a {k} called {v} | My pet {k} is called {v} | I've got a {k} named {v} | The name of my {k} is {v} | My
{k}'s name is {v}
""")
ASK_PET = variants("""
What pet do I have | What is my pet called | What is my pet's name | Do you remember my pet | What is the
name of my pet | Do you know my pet | Which pet do I have | Tell me about my pet | What's my pet called |
Do I have a pet | What kind of pet do I have | What animal do I have | Who is my pet | What's my pet's
name | Do you remember the name of my pet
""")
ASK_PET_KIND = variants("""
What is my {k} called | What is my {k}'s name | What is the name of my {k} | How is my {k} called | Do you
remember my {k}'s name | What's my {k} called | What's my {k}'s name | Who is my {k}
""")
TELL_SECRET = variants("""
The secret word is {v} | The secret is {v} | Remember the word {v} | Remember this word: {v} | The
password is {v} | The code is {v} | Remember the code {v} | Please remember the word {v} | The magic word
is {v} | Please remember the code {v} | Keep this word in mind: {v}
""")
ASK_SECRET = variants("""
What is the secret word | What is the secret | What was the word | Which word did I tell you | What is the
password | What is the code | What was the code | What is the magic word | Which word should you remember
| Do you remember the word | Tell me the secret word | What's the secret word | What was the secret word |
What's the code | What's the password
""")
STORY_REQUESTS = variants("""
Tell me a {l}story about {p} | Tell me a {l}story about {p} | Please tell me a {l}story about {p} | Write
a {l}story about {p} | Can you tell me a {l}story about {p} | A {l}story about {p} | I want a {l}story
about {p} | Tell a {l}story about {p} | Give me a {l}story about {p} | Could you write a {l}story about
{p} | I would like to hear a {l}story about {p} | {l}story about {p} | Do you know a {l}story about {p} |
Now tell me a {l}story about {p} | Make up a {l}story about {p} | Write me a {l}story about {p} | Please
write a {l}story about {p} | Can you write a {l}story about {p} | Tell us a {l}story about {p}
""")
ANY_STORY = variants("""
Tell me a {l}story | Please tell me a {l}story | Write a {l}story | Can you tell me a {l}story | I want a
{l}story | Tell a {l}story | Do you know a {l}story | Can you write a {l}story | I would like a {l}story |
Give me a {l}story
""")
OTHER_REQUESTS = variants("""
What is the capital of {x} | Who is {x} | What is {x} | Where is {x} | Why is the {x} {y} | How do I {v} a
{x} | What is a {x} | Write a poem about {x} | Translate {x} into {z} | What is the weather in {x} | Who
wrote {x} | When did {x} {v} the {z} | Explain {x} to me | What is the meaning of {x} | How many {x} are
there in {z} | How far is {x} from {z} | Write some code that can {v} a {x} | What time is it | What day
is it today | Tell me a joke | Sing a song about {x} | Who is the king of {x} | What should I {v} today |
Which is better, {x} or {z} | Can you {v} the {x} | Do you like {x} | Do you {v} | What do you think of
{x} | I feel {y} today | The {x} is {y} | I think the {x} is too {y} | Why do people {v} | Summarise this
text: {x} {y} {z} | Give me a recipe for {x} | Is {x} {y} | Are {x} {y} | What colour is the {x} | {x} |
{x} {z} | {x} {y} {z} | Write an email to {x} | Book a ticket to {x} | Buy me a {x} | Where can I buy a
{x} | Open the {x} | How does a {x} work | I like {x} | Write a function that {v} the {x} | What is the
best {x} in {z} | Who won the {x} | How old is {x} | Recommend a {x} | Tell me about {x} | What happened
in {d} | Is {d} a prime number | Convert {d} to {x} | What is {d} | What is the {y} {x} | Name a {y} {x} |
Give me a list of {x} | How can I {v} better | Should I {v} or {w} | Let us {v} the {x} | Please {v} the
{x} | You are {y} | What does {x} mean | Spell {x} | Define {x} | How do you spell {x} | What rhymes with
{x} | Draw a {x} | Play {x} | Show me a picture of {x} | Find the {x} | Compare {x} and {z} | I want to
{v} | I do not {v} the {x} | Does a {x} {v} | Did the {x} {v} the {z} | Will it rain in {x} | Can a {x}
{v} | If a {x} can {v}, can a {z} {v} | What is the population of {x} | Who invented the {x} | What is the
largest {x} | When was {x} born | How do I install {x} | Fix this: {x} {d} | def {x}({z}): return {d} |
print({x}) | SELECT {x} FROM {z} | Give me advice | Tell me something about {x} | What is love | Why |
When | Where | Who | How | Go {v} | Make me a {x} | I am {y} | I am feeling {y} | I had {x} for dinner |
Yesterday I saw a {y} {x} | The {x} and the {z} {v} together | Write a song | Write a poem | Write a
letter to {x} | What is your favourite {x} | What is your {x} | What is the news | Tell me a secret | Who
is the president of {x} | Who is the president | What is the speed of light | What is machine learning |
How do planes fly | Sort {x}, {z}, {y} | What is the opposite of {y} | Reverse {x} | Make a rhyme | Is it
{y} to {v} a {x} | What is the difference between a {x} and a {z} | How many letters are in {x} | What
letter does {x} start with | What year is it | What is the date | Do you know {x} | How much does a {x}
cost
""")
GREETINGS = variants("""
Hello | Hi | Hey | Hello there | Hi there | Good morning | Good evening | Good afternoon | Hello! |
Greetings | Hey there | Hi! | Hello, model | Hello again | Good day | Hi, can you help me | Hello, can you
help me | Howdy | Hello world | Hello, is anyone there | Are you there | Hi again | Hello hello | Morning
""")
HOW_ARE_YOU = variants("""
How are you | How are you doing | How are you today | Hi, how are you | Hello, how are you | How do you do
| Are you well | How is it going | How's it going | Hello! How are you | How do you feel | Are you ok |
How have you been
""")
THANKS = variants("""
Thanks | Thank you | Thank you very much | Thanks a lot | Many thanks | Great, thanks | That is nice,
thank you | Ok, thanks | Thx | Thank you so much | Well done | Good job | Very good | Cool, thanks |
Perfect, thank you | Nice, thanks
""")
FAREWELLS = variants("""
Bye | Goodbye | See you | Good night | Bye bye | See you later | I have to go now | That is all, goodbye |
See you tomorrow | I must go | Ok, bye | Bye for now | Farewell | Talk to you later
""")
AGREEMENTS = variants("""
Ok | Okay | Yes | No | All right | Great | Nice | Fine | Sure | Good | Yes please | Wow | I see | Cool |
Right | No thanks | Interesting | Correct | That is right | Hm | Very nice | Perfect
""")
ASK_IDENTITY = variants("""
Who are you | What are you | What is your name | What's your name | Tell me about yourself | Are you a
robot | Are you human | Whats your name | Which model are you | What model is this | Are you a language
model | Who am I talking to | Do you have a name | Introduce yourself | Are you an AI | What should I call
you | Who made you | Please introduce yourself | And who are you | What kind of model are you | Are you a
person | Are you real | How old are you | Where are you from | What model are you | Hi, who are you |
Hello, who are you | Are you ChatGPT
""")
ASK_ABILITIES = variants("""
What can you do | What do you do | Help | What can you help me with | How can you help me | What are you
able to do | What are your skills | What do you know | Can you help me | Tell me what you can do | What
can I ask you | I need help | What are you good at | How do you work | Help me | What else can you do |
What can I do here | What questions can I ask | Please help me | List your skills | Show me what you can
do | Can you do anything | What tasks can you do | How can you help | Hi, what can you do
""")
WEATHER = variants("""
What is the weather in {c} | What is the weather in {c} | What's the weather in {c} | What's the weather
like in {c} | What is the weather like in {c} | What is the weather like in {c} today | What's the weather
like in {c} today | What is the weather in {c} today | What is the weather in {c} now | What's the weather
in {c} right now | What is the weather in {c} tomorrow | How is the weather in {c} | How is the weather in
{c} today | How's the weather in {c} | Weather in {c} | The weather in {c} | weather {c} | Weather for {c}
| Tell me the weather in {c} | Please tell me the weather in {c} | Can you tell me the weather in {c} | Do
you know the weather in {c} | Get the weather for {c} | Get the weather in {c} | Show me the weather in
{c} | Check the weather in {c} | Please check the weather in {c} | Could you check the weather in {c} |
Look up the weather in {c} | What is the current weather in {c} | What's the current weather in {c} | What
is the weather for {c} | What will the weather be in {c} | What will the weather be in {c} tomorrow | What
is the forecast for {c} | What's the forecast for {c} | Is it raining in {c} | Will it rain in {c} | Will
it rain in {c} today | Will it rain in {c} tomorrow | Does it rain in {c} | Is it snowing in {c} | Will it
snow in {c} | Is it sunny in {c} | Is it warm in {c} | Is it cold in {c} | Is it hot in {c} today | How
warm is it in {c} | How cold is it in {c} | How hot is it in {c} | What is the temperature in {c} | What's
the temperature in {c} | What is the temperature in {c} now | Do I need an umbrella in {c} | Should I take
an umbrella in {c} | Hi, what is the weather in {c} | Hello, what's the weather in {c} | I want to know the
weather in {c} | I would like to know the weather in {c} | And what is the weather in {c} | Now tell me
the weather in {c} | How is the weather today in {c} | Please get the weather in {c} | Can you get the
weather in {c} | What is it like outside in {c}
""")
WEATHER_ANYWHERE = variants("""
What is the weather | What's the weather | What is the weather like | What's the weather like | What is the
weather today | What's the weather today | What's the weather like today | How is the weather | How's the
weather | How is the weather today | Tell me the weather | Please tell me the weather | Can you tell me the
weather | Do you know the weather | Check the weather | Can you check the weather | Please check the
weather | Get the weather | Weather | Weather, please | The weather | The weather, please | What will the
weather be tomorrow | What is the weather tomorrow | What is the forecast | What's the forecast for today |
Will it rain | Will it rain today | Will it rain tomorrow | Is it raining | Is it snowing | Is it sunny
today | Is it warm outside | Is it cold outside | How warm is it | How cold is it outside | What is the
temperature | What's the temperature | What's the temperature now | Do I need an umbrella | Should I take an
umbrella | I want to know the weather | Hi, what is the weather | Hello, how is the weather
""")
WEATHER_PLACE = variants("""
{c} | {c} | {c} | In {c} | In {c} | {c}, please | {c} please | I mean {c} | For {c} | In {c}, please | The
weather in {c} | I mean the weather in {c} | In {c} today
""")
WEATHER_AGAIN = variants("""
And in {c} | And in {c} | What about {c} | How about {c} | And the weather in {c} | And for {c} | Now in {c} |
What about in {c} | And now {c} | And what about {c}
""")
BESIDE_TOOLS = variants("""
What time is it in {c} | What is the time in {c} | What is the capital of {c} | Where is {c} | How far is
{c} | How do I get to {c} | Book a flight to {c} | Book a hotel in {c} | Find a hotel in {c} | Tell me
about {c} | How many people live in {c} | What is the population of {c} | Who lives in {c} | Is {c} big |
How old is {c} | What is the news in {c} | Search for {c} | Search the web for {c} | Which language do they
speak in {c} | Who is the mayor of {c} | What is the best food in {c} | Show me a map of {c} | Do you like
{c} | Send an email to {c} | Call {c} | What is in the file {c} | Turn on the light in {c} | Play some music
from {c} | What can I do in {c} | Is {c} nice | What is the price of {c} | Buy a ticket to {c} | Is there a
train to {c} | When does the train to {c} leave | What day is it in {c} | What is {c} known for | Write a
poem about {c} | What time is it | Search the web | Send an email | Read the file | Play some music | What is
the news | Turn off the light | Book a table in {c}
""")
