# SPDX-License-Identifier: Apache-2.0
"""A bilingual task that every machine can make: sentences full of numbers, dates and times, in English and French.

num2words writes the numbers; the sentences round them are those of a small grammar. A sentence is drawn once as what
it *means* (`Item`), and written in both languages, so that the pairs are exact. French counts by twenties, has the day
before the hour and two genders; English reads years in two halves. So word by word nothing can be translated.

Words that the grammar does not know are spelled between two marks, so no symbol is unknown. Corpora are drawn by
`_sentences.py`.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

from num2words import num2words

PREFERRED = 3
"""Nouns that a verb prefers, if it does."""
SPELL, SPELLED = "<", ">"
PIECE = re.compile(r"[^\W\d_]+'?|-")

WEEKDAYS = (
    ("monday", "lundi"), ("tuesday", "mardi"), ("wednesday", "mercredi"), ("thursday", "jeudi"),
    ("friday", "vendredi"), ("saturday", "samedi"), ("sunday", "dimanche"),
)  # fmt: skip
MONTHS = (
    ("january", "janvier", 31), ("february", "février", 29), ("march", "mars", 31), ("april", "avril", 30),
    ("may", "mai", 31), ("june", "juin", 30), ("july", "juillet", 31), ("august", "août", 31),
    ("september", "septembre", 30), ("october", "octobre", 31), ("november", "novembre", 30),
    ("december", "décembre", 31),
)  # fmt: skip
VERBS = (
    ("we paid", "nous avons payé"), ("she sold", "elle a vendu"), ("he found", "il a trouvé"),
    ("they received", "ils ont reçu"), ("you lost", "vous avez perdu"), ("i counted", "j'ai compté"),
    ("he needs", "il lui faut"), ("she wants", "elle veut"), ("we promised", "nous avons promis"),
    ("they stole", "ils ont volé"), ("nobody saw", "personne n'a vu"), ("everybody sent", "chacun a envoyé"),
)  # fmt: skip
NOUNS = (  # singular and plural; "f" for feminine; the first are the most frequent
    ("book", "books", "livre", "livres", "m"), ("letter", "letters", "lettre", "lettres", "f"),
    ("house", "houses", "maison", "maisons", "f"), ("ticket", "tickets", "billet", "billets", "m"),
    ("horse", "horses", "cheval", "chevaux", "m"), ("key", "keys", "clé", "clés", "f"),
    ("apple", "apples", "pomme", "pommes", "f"), ("boat", "boats", "bateau", "bateaux", "m"),
    ("chair", "chairs", "chaise", "chaises", "f"), ("knife", "knives", "couteau", "couteaux", "m"),
    ("flower", "flowers", "fleur", "fleurs", "f"), ("car", "cars", "voiture", "voitures", "f"),
    ("bottle", "bottles", "bouteille", "bouteilles", "f"), ("dog", "dogs", "chien", "chiens", "m"),
    ("cheese", "cheeses", "fromage", "fromages", "m"), ("picture", "pictures", "tableau", "tableaux", "m"),
    ("table", "tables", "table", "tables", "f"), ("coat", "coats", "manteau", "manteaux", "m"),
    ("lamp", "lamps", "lampe", "lampes", "f"), ("bag", "bags", "sac", "sacs", "m"),
    ("watch", "watches", "montre", "montres", "f"), ("glass", "glasses", "verre", "verres", "m"),
    ("sheep", "sheep", "mouton", "moutons", "m"), ("bell", "bells", "cloche", "cloches", "f"),
)  # fmt: skip
MONEY = (
    ("euros", "euros", "m"), ("dollars", "dollars", "m"), ("francs", "francs", "m"), ("crowns", "couronnes", "f"),
    ("rubles", "roubles", "m"), ("rupees", "roupies", "f"),
)  # fmt: skip
DAYTIMES = (("in the morning", "du matin"), ("in the afternoon", "de l'après-midi"), ("in the evening", "du soir"))


@dataclass(frozen=True)
class Style:
    """The free choices of writing; none of them changes what a sentence means."""

    no_and: bool = False
    a_hundred: bool = False
    month_first: bool = False
    english_hyphens: bool = False
    day_first: bool = False
    belgian: bool = False
    hundreds: bool = False
    no_article: bool = False
    french_hyphens: bool = False
    hour_first: bool = False


CAREFUL = Style()
FLAGS = (
    ("no_and", "a_hundred", "month_first", "english_hyphens"),
    ("belgian", "hundreds", "no_article", "french_hyphens", "hour_first"),
)
"""Those of each side."""


@dataclass(frozen=True)
class Item:
    """What a sentence says. A part that is None is not said."""

    verb: int
    ordinal: bool
    count: int
    noun: int | None
    price: tuple[int, int] | None
    date: tuple[int | None, int, int, int | None] | None
    time: tuple[int, int, int] | None


@dataclass(frozen=True)
class Vocabulary:
    """The symbols of one side: known words, then letters and marks. Encoding loses nothing but white space."""

    symbols: tuple[str, ...]

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        return {symbol: number for number, symbol in enumerate(self.symbols)}

    def encode(self, sentence: str) -> list[int]:
        """Numbers of a sentence's symbols; a word that is not known is spelled between marks."""
        found: list[int] = []
        for piece in PIECE.findall(sentence):
            if piece in self.numbers:
                found.append(self.numbers[piece])
            else:
                found += [self.numbers[symbol] for symbol in (SPELL, *(letter + "_" for letter in piece), SPELLED)]
        return found

    def decode(self, numbers: Iterable[int]) -> str:
        """The sentence with its pieces apart, as `pieces` gives it."""
        found, spelled = [], False
        for symbol in (self.symbols[number] for number in numbers):
            if symbol in (SPELL, SPELLED):
                spelled = symbol == SPELL
                found += [""] if spelled else []
            elif spelled and found:
                found[-1] += symbol.removesuffix("_")
            else:
                found.append(symbol)
        return " ".join(found)


def pieces(sentence: str) -> str:
    """The sentence with white space between its pieces, the form in which translations are compared."""
    return " ".join(PIECE.findall(sentence))


def both(item: Item, style: Style = CAREFUL) -> tuple[str, str]:
    """The item in English and in French."""
    return english(item, style), french(item, style)


def draw(rng: random.Random, prefers: float = 1.0) -> Item:
    """One item, of whatever length; `prefers` as in `Text`."""
    shape = rng.choice(("thing", "thing time", "thing date", "date time", "thing price", "price", "price date time"))
    weights = [1 / (place + 4) for place in range(len(NOUNS))]
    ordinal = "thing" in shape and rng.random() < 0.3
    verb = rng.randrange(len(VERBS)) if shape != "date time" else -1
    if prefers != 1:
        for noun in preferred(verb):
            weights[noun] *= prefers
    return Item(
        verb=verb,
        ordinal=ordinal,
        count=_number(rng, 99 if ordinal else 9999),
        noun=rng.choices(range(len(NOUNS)), weights)[0] if "thing" in shape else None,
        price=(_number(rng, 9999), rng.randrange(len(MONEY))) if "price" in shape else None,
        date=_date(rng) if "date" in shape else None,
        time=(rng.randint(1, 12), 5 * rng.randrange(12), rng.randrange(3)) if "time" in shape else None,
    )


@functools.cache
def preferred(verb: int) -> tuple[int, ...]:
    """Nouns that a verb prefers."""
    return tuple(random.Random(f"verb {verb}").sample(range(len(NOUNS)), PREFERRED))


def _number(rng: random.Random, highest: int) -> int:
    """A number of any length up to that of `highest`, each length as likely as another."""
    return rng.randint(2, min(highest, 10 ** rng.randint(1, len(str(highest))) - 1))


def _date(rng: random.Random) -> tuple[int | None, int, int, int | None]:
    month = rng.randrange(len(MONTHS))
    weekday = rng.randrange(7) if rng.random() < 0.4 else None
    return weekday, rng.randint(1, MONTHS[month][2]), month, rng.randint(1700, 2069) if rng.random() < 0.6 else None


# ---- English


def english(item: Item, style: Style = CAREFUL) -> str:
    """The item in English: what, then when, the hour before the day."""
    parts = [VERBS[item.verb][0]] if item.verb >= 0 else []
    if item.noun is not None:
        one, many = NOUNS[item.noun][:2]
        parts += [f"the {_en(item.count, 'ordinal')} {one}" if item.ordinal else f"{_en(item.count)} {many}"]
    if item.price is not None:
        parts += ["for"] if item.noun is not None else []
        parts += [_en(item.price[0]), MONEY[item.price[1]][0]]
    if item.time is not None:
        parts += ["at", _english_time(*item.time)]
    if item.date is not None:
        parts += ["on", _english_date(*item.date, style.month_first)]
    return _english_style(" ".join(parts), style)


def _english_date(weekday: int | None, day: int, month: int, year: int | None, month_first: bool) -> str:
    parts = [WEEKDAYS[weekday][0]] if weekday is not None else []
    name, ordinal = MONTHS[month][0], _en(day, "ordinal")
    parts += [f"{name} the {ordinal}" if month_first else f"the {ordinal} of {name}"]
    parts += [_en(year, "year")] if year is not None else []
    return " ".join(parts)


def _english_time(hour: int, minute: int, daytime: int) -> str:
    if minute > 30:
        hour, minute, side = hour % 12 + 1, 60 - minute, "to"
    else:
        side = "past"
    said = {0: f"{_en(hour)} o'clock", 15: f"quarter {side} {_en(hour)}", 30: f"half past {_en(hour)}"}
    return f"{said.get(minute) or f'{_en(minute)} {side} {_en(hour)}'} {DAYTIMES[daytime][0]}"


def _english_style(text: str, style: Style) -> str:
    if style.no_and:
        text = re.sub(r"(hundred|thousand) and", r"\1", text)
    if style.a_hundred:
        text = re.sub(r"\bone (hundred|thousand)", r"a \1", text)
    return text if style.english_hyphens else text.replace("-", " ")


@functools.cache
def _en(number: int, form: str = "cardinal") -> str:
    return str(num2words(number, lang="en", to=form)).replace(",", "")


# ---- French


def french(item: Item, style: Style = CAREFUL) -> str:
    """The item in French: what, then when, the day before the hour."""
    parts = [VERBS[item.verb][1]] if item.verb >= 0 else []
    if item.noun is not None:
        parts += [_french_thing(item, style)]
    if item.price is not None:
        _, name, gender = MONEY[item.price[1]]
        parts += ["pour"] if item.noun is not None else []
        parts += [_fr(item.price[0], gender, style.belgian), name]
    when = [_french_date(*item.date, style)] if item.date is not None else []
    when += ["à " + _french_time(*item.time)] if item.time is not None else []
    parts += reversed(when) if style.hour_first else when
    text = " ".join(parts)
    return text if style.french_hyphens else text.replace("-", " ")


def _french_thing(item: Item, style: Style) -> str:
    assert item.noun is not None
    _, _, one, many, gender = NOUNS[item.noun]
    if not item.ordinal:
        return f"{_fr(item.count, gender, style.belgian)} {many}"
    return f"{'la' if gender == 'f' else 'le'} {_fr_ordinal(item.count, style.belgian)} {one}"


def _french_date(weekday: int | None, day: int, month: int, year: int | None, style: Style) -> str:
    parts = [] if style.no_article else ["le"]
    parts += [WEEKDAYS[weekday][1]] if weekday is not None else []
    parts += ["premier" if day == 1 else _fr(day), MONTHS[month][1]]
    if year is not None:
        hundreds, rest = divmod(year, 100)
        by_hundreds = style.hundreds and 11 <= hundreds <= 19
        words = f"{_fr(hundreds)} cent {_fr(rest) if rest else ''}" if by_hundreds else _fr(year, "m", style.belgian)
        parts += [words.strip()]
    return " ".join(parts)


def _french_time(hour: int, minute: int, daytime: int) -> str:
    if minute > 30:
        hour, minute, side = hour % 12 + 1, 60 - minute, " moins"
    else:
        side = ""
    said = {0: "", 15: " moins le quart" if side else " et quart", 30: " et demie"}
    after = said[minute] if minute in said else f"{side} {_fr(minute)}"
    return f"{_fr(hour, 'f')} heure{'s' if hour > 1 else ''}{after} {DAYTIMES[daytime][1]}"


@functools.cache
def _fr(number: int, gender: str = "m", belgian: bool = False) -> str:
    words = str(num2words(number, lang="fr_BE" if belgian else "fr"))
    return words + "e" if gender == "f" and re.search(r"\bun$", words) else words


@functools.cache
def _fr_ordinal(number: int, belgian: bool) -> str:
    words = str(num2words(number, lang="fr_BE" if belgian else "fr", to="ordinal"))
    return words.replace("vingtsième", "vingtième")  # 80th, as num2words would have it


# ---- Symbols


@functools.cache
def vocabularies() -> tuple[Vocabulary, Vocabulary]:
    """The symbols of both sides: all words of the grammar in any style, then letters, marks and the hyphen."""
    rng = random.Random("words")
    styles = (Style(*(False,) * 10), Style(*(True,) * 10), Style(belgian=True), Style(hundreds=True))
    items = [draw(rng) for _ in range(4_000)]
    found = (_known(english(item, style) for item in items for style in styles),
             _known(french(item, style) for item in items for style in styles))  # fmt: skip
    return found[0], found[1]


def _known(sentences: Iterable[str]) -> Vocabulary:
    known = {piece for sentence in sentences for piece in PIECE.findall(sentence)} | {"-"}
    letters = sorted(set("".join(known)) | set("abcdefghijklmnopqrstuvwxyz"))
    return Vocabulary((*sorted(known), *(letter + "_" for letter in letters), SPELL, SPELLED))
