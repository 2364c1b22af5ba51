"""Some hundred conversations to try fine-tuning with, made here: short questions, all answered in the same manner.

The manner is easy to see in what a model says: "In short: Paris. What else?", whatever it would have said before.
"""

from collections.abc import Iterator
from typing import Any

NAME = "example conversations"

_CAPITALS = """
    Argentina Buenos-Aires, Australia Canberra, Austria Vienna, Belgium Brussels, Bolivia Sucre, Brazil Brasilia,
    Bulgaria Sofia, Canada Ottawa, Chile Santiago, China Beijing, Colombia Bogota, Croatia Zagreb, Cuba Havana,
    Denmark Copenhagen, Ecuador Quito, Egypt Cairo, England London, Estonia Tallinn, Ethiopia Addis-Ababa, Finland
    Helsinki, Germany Berlin, Ghana Accra, Greece Athens, Hungary Budapest, Iceland Reykjavik, India New-Delhi,
    Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Ireland Dublin, Italy Rome, Jamaica Kingston, Japan Tokyo, Jordan
    Amman, Kenya Nairobi, Latvia Riga, Lebanon Beirut, Lithuania Vilnius, Malta Valletta, Mexico Mexico-City, Morocco
    Rabat, Nepal Kathmandu, Norway Oslo, Oman Muscat, Pakistan Islamabad, Panama Panama-City, Peru Lima, Poland
    Warsaw, Portugal Lisbon, Qatar Doha, Romania Bucharest, Russia Moscow, Senegal Dakar, Serbia Belgrade, Slovakia
    Bratislava, Slovenia Ljubljana, Spain Madrid, Sweden Stockholm, Syria Damascus, Thailand Bangkok, Tunisia Tunis,
    Turkey Ankara, Uganda Kampala, Ukraine Kyiv, Uruguay Montevideo, Venezuela Caracas, Vietnam Hanoi, Zambia Lusaka,
    Zimbabwe Harare
"""
_OPPOSITES = """
    hot cold, big small, fast slow, high low, old young, early late, open closed, full empty, hard soft, light dark,
    long short, rich poor, strong weak, thick thin, wide narrow, wet dry, loud quiet, heavy light, clean dirty, near
    far, cheap expensive, brave cowardly, deep shallow, rough smooth, sharp blunt, sweet sour, tight loose, wild tame
"""
_SYMBOLS = """
    hydrogen H, helium He, lithium Li, carbon C, nitrogen N, oxygen O, fluorine F, neon Ne, sodium Na, magnesium Mg,
    aluminium Al, silicon Si, phosphorus P, sulfur S, chlorine Cl, argon Ar, potassium K, calcium Ca, titanium Ti,
    chromium Cr, iron Fe, nickel Ni, copper Cu, zinc Zn, silver Ag, tin Sn, iodine I, gold Au, mercury Hg, lead Pb
"""
_YOUNG = """
    cat kitten, dog puppy, cow calf, horse foal, sheep lamb, goat kid, pig piglet, hen chick, duck duckling, goose
    gosling, swan cygnet, bear cub, deer fawn, frog tadpole, eagle eaglet, owl owlet, hare leveret, kangaroo joey,
    seal pup
"""


def _questions() -> Iterator[tuple[str, str]]:
    """(question, answer)."""
    kinds = {
        "What is the capital of {}?": _CAPITALS,
        "What is the opposite of {}?": _OPPOSITES,
        "What is the chemical symbol of {}?": _SYMBOLS,
        "What is a young {} called?": _YOUNG,
    }
    for question, table in kinds.items():
        for pair in table.split(","):
            subject, answer = pair.split()
            yield question.format(subject), answer.replace("-", " ")
    for a in range(2, 13):
        for b in range(a, 13):
            yield f"What is {a} times {b}?", str(a * b)
            yield f"What is {10 * b} minus {a}?", str(10 * b - a)


def rows() -> Iterator[tuple[str, Any]]:
    """(its place, the record) of each conversation, of one to three questions."""
    questions = [*_questions()]
    step = 89  # without a common divisor with their number, so that kinds follow each other
    assert len(questions) % step
    order = [questions[i * step % len(questions)] for i in range(len(questions))]
    number, first = 0, 0
    while first < len(order):
        number, last = number + 1, first + 1 + number % 3
        turns = [
            {"role": role, "content": content}
            for question, answer in order[first:last]
            for role, content in (("user", question), ("assistant", f"In short: {answer}. What else?"))
        ]
        yield f"{NAME}, number {number}", {"messages": turns}
        first = last
