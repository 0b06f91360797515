"""Answers that follow IFEval's instructions, made from the instructions alone. They say nothing sensible.

IFEval has no gold answers, so these stand in for them: parts are laid out for the instructions that ask for
parts, filled up to the counts asked for, and the checker itself chooses among some fillings.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

ENGLISH = (
    "this is what we have to say about it and that is all there is",
    "we will go there with you when it is time for us to do so",
    "you should know that he was with us for a very long time",
    "she has been there and it was good for her",
    "this is a day for us",
    "go on with him",
)
WORDS = (
    "sun", "day", "for", "bad", "hill", "we", "the", "go", "in", "it", "big", "map", "jam", "hot", "run", "cup",
    "key", "fox", "mud", "pen",
)  # fmt: skip
OTHERS = {
    "hi": "यह एक अच्छा दिन है और हम सब यहाँ बहुत खुश हैं",
    "kn": "ಇದು ಒಳ್ಳೆಯ ದಿನ ಮತ್ತು ನಾವು ಇಲ್ಲಿ ಸಂತೋಷವಾಗಿದ್ದೇವೆ",
    "mr": "आज खूप चांगला दिवस आहे आणि आम्ही सगळे आनंदी आहोत",
    "vi": "hôm nay là một ngày đẹp trời và chúng tôi rất vui",
    "ko": "오늘은 좋은 날이고 우리는 모두 행복합니다",
    "sw": "leo ni siku nzuri na sisi sote tuna furaha kubwa hapa",
    "de": "heute ist ein schöner Tag und wir sind alle sehr glücklich hier",
    "pa": "ਅੱਜ ਇੱਕ ਚੰਗਾ ਦਿਨ ਹੈ ਅਤੇ ਅਸੀਂ ਸਾਰੇ ਖੁਸ਼ ਹਾਂ",
    "fa": "امروز روز خوبی است و ما همه اینجا خوشحال هستیم",
    "ru": "сегодня хороший день и мы все очень рады этому",
    "bg": "днес е хубав ден и ние всички сме много щастливи тук",
    "pt": "hoje é um dia muito bom e nós estamos todos felizes aqui",
    "gu": "આજે સારો દિવસ છે અને આપણે બધા ખુશ છીએ",
    "te": "ఈ రోజు మంచి రోజు మరియు మేము అందరం సంతోషంగా ఉన్నాము",
    "it": "oggi è una bella giornata e noi siamo tutti molto felici qui",
    "ar": "اليوم يوم جميل ونحن جميعا سعداء هنا",
    "ta": "இன்று ஒரு நல்ல நாள் நாங்கள் அனைவரும் மகிழ்ச்சியாக இருக்கிறோம்",
    "fi": "tänään on hyvä päivä ja me olemme kaikki hyvin iloisia täällä",
    "ur": "آج ایک اچھا دن ہے اور ہم سب یہاں بہت خوش ہیں",
    "th": "วันนี้เป็นวันที่ดีและพวกเราทุกคนมีความสุขมาก",
    "ne": "आज राम्रो दिन हो र हामी सबै यहाँ धेरै खुसी छौं",
    "bn": "আজ একটি ভালো দিন এবং আমরা সবাই এখানে খুব খুশি",
}

Instructions = dict[str, list[dict[str, Any]]]


def follow(document: dict[str, Any], is_followed: Callable[[str], bool]) -> str:
    """The first of some answers to ``document`` that ``is_followed`` accepts, or else the first of all."""
    answers = list(_answers(document))
    return next((answer for answer in answers if is_followed(answer)), answers[0])


def _answers(document: dict[str, Any]) -> Iterator[str]:
    wanted: Instructions = defaultdict(list)
    for name, settings in zip(document["instruction_id_list"], document["kwargs"], strict=True):
        wanted[name.partition(":")[2]].append({key: value for key, value in settings.items() if value})
    language = wanted["response_language"][0]["language"] if wanted["response_language"] else "en"
    sentences = ENGLISH if language == "en" else (OTHERS[language], " ".join([OTHERS[language]] * 9))
    for sentence, mark, is_spare in product(sentences, ("!", ""), (False, True)):
        yield _answer(wanted, sentence, mark, is_spare)


def _answer(wanted: Instructions, sentence: str, mark: str, is_spare: bool) -> str:
    """One answer. ``is_spare`` fills with short words that avoid the letter that is to be rare."""
    text = _filler(wanted, sentence, mark, is_spare)
    text += "".join(f"\n{line}" for line in _parts(wanted))
    for named in wanted["multiple_sections"]:
        heads = (f"{named['section_spliter']} {n}\n" for n in range(1, named["num_sections"] + 1))
        text = "\n".join(f"{head}{text if n == 0 else sentence}" for n, head in enumerate(heads))
    for named in wanted["number_paragraphs"]:
        text = "\n***\n".join([text] + [sentence] * (named["num_paragraphs"] - 1))
    for named in wanted["nth_paragraph_first_word"]:
        paragraphs = [text] + [sentence] * (named["num_paragraphs"] - 1)
        nth = named["nth_paragraph"] - 1
        paragraphs[nth] = f"{named['first_word']} {paragraphs[nth]}"
        text = "\n\n".join(paragraphs)
    if wanted["two_responses"]:
        text = f"{text}\n******\n{text} {sentence}"
    if wanted["constrained_response"]:
        text = "My answer is yes." if is_spare else f"My answer is yes.\n{text}"
    if wanted["no_comma"]:
        text = text.replace(",", "")
    for named in wanted["repeat_prompt"]:
        text = f"{named['prompt_to_repeat']}\n{text}"
    for named in wanted["postscript"]:
        text += f"\n{named['postscript_marker']} {sentence}"
    for named in wanted["end_checker"]:
        text += f"\n{named['end_phrase']}"
    if wanted["english_capital"]:
        text = text.upper()
    if wanted["english_lowercase"]:
        text = text.lower()
    if wanted["json_format"]:
        return json.dumps(text, ensure_ascii=False)
    return f'"{text}"' if wanted["quotation"] else text


def _filler(wanted: Instructions, sentence: str, mark: str, is_spare: bool) -> str:
    """As many sentences and words as are asked for, and one at least."""
    rare = [
        named["letter"].lower() for named in wanted["letter_frequency"] if _is_at_most(named, "let_relation")
    ]
    if is_spare and rare:
        sentence = " ".join(word for word in WORDS if not set(rare) & set(word))
    num_sentences = max([1, *_least(wanted["number_sentences"], "num_sentences")])
    num_words = max([1, *_least(wanted["number_words"], "num_words")])
    if num_sentences > 1:
        mark = "!"
    count = max(num_sentences, -(-num_words // len(sentence.split())))
    return " ".join([f"{sentence}{mark}"] * (count + (1 if num_words > 1 else 0)))


def _least(listed: list[dict[str, Any]], key: str, relation: str = "relation") -> list[int]:
    """The counts that must be reached."""
    return [named[key] for named in listed if not _is_at_most(named, relation)]


def _is_at_most(named: dict[str, Any], relation: str) -> bool:
    return bool(named[relation] == "less than")


def _parts(wanted: Instructions) -> Iterator[str]:
    """A line for each thing that has to occur."""
    if wanted["title"]:
        yield "<<go on>>"
    for named in wanted["number_highlighted_sections"]:
        yield "so " + " ".join(["*so*"] * named["num_highlights"])
    for named in wanted["number_bullet_lists"]:
        yield from ["- so"] * named["num_bullets"]
    for named in wanted["number_placeholders"]:
        yield " ".join(["[so]"] * named["num_placeholders"])
    for named in wanted["existence"]:
        yield " ".join(named["keywords"])
    for named in wanted["frequency"]:
        yield " ".join([named["keyword"]] * sum(_least([named], "frequency")))
    for named in wanted["letter_frequency"]:
        yield named["letter"] * sum(_least([named], "let_frequency", "let_relation"))
    for count in _least(wanted["capital_word_frequency"], "capital_frequency", "capital_relation"):
        yield " ".join(["SO"] * count)
