"""The words of which chat prompts are made: topics and questions, some of them for held-out prompts alone."""

TOPICS = tuple(
    """
growing tomatoes on a balcony|the water cycle|learning to play the guitar|the French Revolution|how vaccines work
saving money as a student|black holes|making sourdough bread|public speaking|climate change|the history of chess
a first marathon|photosynthesis|job interviews|the Silk Road|caring for a puppy|prime numbers|time management
electric cars|the human heart|writing a cover letter|volcanoes|remote work|the Roman Empire|healthy breakfasts
machine learning|sleep|the stock market|bird watching|the periodic table|negotiating a salary|coral reefs
learning Spanish|the moon landing|yoga for beginners|supply and demand|recycling at home|DNA|planning a wedding
the Great Wall of China|reading more books|gravity|small talk|the industrial revolution|composting|earthquakes
meditation|the Pythagorean theorem|buying a used car|jazz music|antibiotics|moving to a new city|bees
the speed of light|making friends as an adult|plate tectonics|home insulation|Shakespeare|a balanced diet
solar energy|team conflicts|the digestive system|travelling alone|probability|the Renaissance|houseplants
stress before exams|renewable energy|photography at night|the Cold War|baking a birthday cake|inflation
the water supply of a city|teaching children to read|whales|writing poetry|the nervous system|camping in the rain
computer networks|giving feedback|ancient Egypt|swimming technique|credit cards|the ozone layer|board games
learning to drive|the scientific method|knitting|asteroids|running a small shop|democracy|allergies|street food
data privacy|mountain climbing|the printing press|getting up early|fractions|penguins|first aid|modern art
open source software|gardening in winter|the Olympic Games|good passwords|rivers|apologising|tea|rainbows
cycling to work|the immune system|learning to cook|mythology|budgeting for a family|satellites|a school play
fermentation|urban planning|motivation|the violin|tides|customer complaints|forests|mental arithmetic|coffee
bridges|jet lag|the Vikings|writing a speech|insects|home repairs|lightning|studying abroad|old photographs
the metric system|volunteering|dinosaurs|lifting weights|the Amazon rainforest|kindness|spreadsheets|glaciers
origami|nuclear power|choosing a career|soap|detective novels|the kidneys|train journeys|optical illusions|salt
""".strip()
    .replace("\n", "|")
    .split("|")
)
QUESTION_FORMS = tuple(
    """
What is the most important thing to know about {}?|Give me five tips about {}.|Explain {} to a ten-year-old.
Write a short introduction to {}.|What are common mistakes with {}?|Make a table of pros and cons for {}.
How would you explain {} in two sentences?|I know nothing about {}. Where should I start?
Write a step-by-step guide about {}.|What should I read to learn more about {}?|Why does {} matter?
Tell me three surprising facts about {}.|Write a dialogue between two friends about {}.
Compare {} today with a hundred years ago.|Draft an email to my team about {}.|What questions should I ask about {}?
Make a quiz with four questions about {}, with answers.|Describe {} as a list of short bullet points.
Plan a one-week schedule around {}.|What do experts disagree on about {}?|Write a checklist for {}.
""".strip()
    .replace("\n", "|")
    .split("|")
)
HELDOUT_CHAT = tuple(
    """
Can you recommend a relaxing way to spend a rainy Sunday at home?
My neighbour plays loud music at night. How can I talk to them without starting a fight?
What is the difference between a virus and a bacterium?
I have eggs, rice and an onion. What can I cook for dinner?
How do airplanes stay in the air?
Give me a plan for learning to type faster in one month.
Why is the sky blue, and why are sunsets red?
My laptop has become very slow. What should I check first?
What are the main causes of the First World War?
Help me write a polite message to decline an invitation.
How does a bicycle keep its balance?
What should I pack for a three-day hike?
Explain how interest on a loan works.
What makes a good leader?
Which exercises help against back pain from sitting all day?
How do I teach my dog to sit?
What is the capital of Australia, and why is it not Sydney?
Suggest names for a small bakery and explain each one.
How can I remember the names of people I meet?
What is a black box in an aircraft?
Write a toast for my grandmother's eightieth birthday.
What happens in the body when we are afraid?
How do I start a vegetable garden in a small yard?
Explain the rules of football to someone who has never seen it.
""".strip().split("\n")
)
HELDOUT_PROSE = tuple(
    """
Write the opening paragraph of a novel about a lighthouse keeper who hears a radio signal.
Write a short essay on why people keep diaries.
Describe a busy market in the early morning.
Write a fairy tale about a clock that is afraid of midnight.
Write a letter from a sailor to his sister.
Describe an old library during a thunderstorm.
Write a short story about two strangers who share an umbrella.
Write a paragraph that argues for longer school holidays.
Write a news report about a town where it has not rained for a year.
Describe the feeling of coming home after a long journey.
Write a short biography of an imaginary inventor.
Write a scene in which a chess player loses on purpose.
""".strip().split("\n")
)
PROSE_FORMS = tuple(
    """
Write a short story about {}.|Write a paragraph that describes {} to someone who has never heard of it.
Write the first page of a novel in which {} plays a part.|Write a newspaper article about {}.
Write a reflective essay about {}.|Write a fable whose moral has to do with {}.|Write a speech about {}.
Write a diary entry of someone who is busy with {}.|Write a letter to a friend about {}.
""".strip()
    .replace("\n", "|")
    .split("|")
)
JSON_FIELDS = tuple("name title summary tags difficulty steps author year rating price location category notes".split())
JSON_OBJECT_FORMS = (
    "Write a JSON object that describes {}, with the fields {}. Answer with JSON only.",
    "Give me a JSON list of three examples about {}; each has the fields {}.",
    "Create sample data in JSON about {} with the keys {}.",
)
JSON_EXTRACTION_FORMS = (
    "Extract the facts of this text as a JSON object with the fields {}:\n\n{}",
    "Turn this text into JSON with the keys {}:\n\n{}",
)
SUMMARY_FORMS = (
    "Summarise the following text in three sentences:\n\n{}",
    "List the key points of this text, in its own words:\n\n{}",
    "Repeat the following text, and correct only its mistakes:\n\n{}",
    "Rewrite the following text with shorter sentences:\n\n{}",
    "Quote the most important sentences of this text:\n\n{}",
)
CODE_FORMS = (
    "Write the Python function `{name}` with this signature and docstring:\n\n```python\n{head}\n```",
    "Explain step by step what this Python function does:\n\n```python\n{code}\n```",
    "Complete this Python function:\n\n```python\n{half}\n```",
    "Write unit tests for this Python function:\n\n```python\n{code}\n```",
    "Rewrite this Python function with type hints and comments:\n\n```python\n{code}\n```",
)
