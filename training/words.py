"""What the world prints: words to read, and names of things that it never holds."""

import random
import string

_WORDS = """
    able acid army baby back ball band bank barn base bath beach bean bear bell belt bike bird blue boat body bold
    bone book boot born bowl bread bring brush build bus cake call camp card care cash cat chair chalk city clay
    clean clock close cloud club coat code coffee cold cook cool corn cow crab crown cup dance dark data date deep
    deer desk dish dog door down draw dream dress drink drum duck dust eagle early earth east easy edge eight exit
    face fact fall farm fast film find fire fish five flag flat flower fly food foot fork fox free fresh frog fruit
    game garden gate gift girl glass goat gold good grape grass great green hand happy hard hat hello help hero
    high hill home honey hope horse hotel house ice idea iron island jacket jam jazz join juice jump keep key kind
    king kite knife lake lamp land large last leaf lemon level light lime line lion list live lock long love lucky
    lunch magic mail map mark market mask meat melon menu metal milk mint mix moon mouse music nail name nest new
    next nice night nine north nose note ocean oil one open orange owl page paint paper park part party peace pear
    pen phone piano pink pizza plan plant play plum point pond pool press prize pull push queen quick quiet quiz
    radio rain ready red rest rice ring river road robot rock room rose round run sail salt sand save school sea
    seed seven shell ship shop sign silver sing six sky sleep slow small smile snow soap sock soft song soup south
    space spoon sport spring stamp stop store storm story strong sugar summer sun sweet swim table tail tall tea
    team tent test three tiger time toast today top town toy train tree truck true turn twin two under up vase view
    village voice walk wall warm wash water wave welcome west wheat wheel white wide wild wind window wine winter
    wolf wood word work world yard year yellow yes young zebra zero zone zoo
    """
PRINTED_WORDS = tuple(_WORDS.split())
# Letters and digits that stand alone; those that look like one another are left out.
LETTERS = tuple(letter for letter in string.ascii_uppercase if letter not in "IO")
DIGITS = tuple(string.digits)

_STRANGERS = """
    dog cat car person house tree bicycle bus plane boat horse chair table flower apple banana cup phone book clock
    elephant giraffe pizza train man woman child bird fish bottle shoe hat umbrella guitar laptop keyboard robot
    mountain cloud bridge cow sheep truck sofa bed spoon fork knife key lamp window door face hand ball
    """
STRANGERS = tuple(_STRANGERS.split())
"""Things that people ask for and that no scene holds."""


def random_text(rng: random.Random) -> tuple[str, str]:
    """What to print, and what that is called: a letter, a digit, a number or a word."""
    kind = rng.choices(("letter", "digit", "number", "word"), (3, 2, 2, 6))[0]
    if kind == "letter":
        return rng.choice(LETTERS), kind
    if kind == "digit":
        return rng.choice(DIGITS), kind
    if kind == "number":
        return str(rng.randint(10, 999)), kind
    if rng.random() < 0.65:
        word = rng.choice(PRINTED_WORDS)
    else:  # letters in no known order, so that reading is reading
        word = "".join(rng.choice("bcdfghjklmnprstvwz" if i % 2 else "aeiou") for i in range(rng.randint(3, 6)))
        if rng.random() < 0.5:
            word = word[1:] + rng.choice("bcdfghklmnprstvwxyz")
    style = rng.random()
    return (word.upper() if style < 0.6 else word.capitalize() if style < 0.8 else word), kind


def plural(noun: str) -> str:
    """The plural of a noun of this world."""
    irregular = {"person": "people", "man": "men", "woman": "women", "child": "children", "knife": "knives"}
    irregular |= {"sheep": "sheep", "fish": "fish"}
    if noun in irregular:
        return irregular[noun]
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def with_article(phrase: str) -> str:
    """`phrase` after "a" or "an"."""
    return ("an " if phrase[0].lower() in "aeiou" else "a ") + phrase
