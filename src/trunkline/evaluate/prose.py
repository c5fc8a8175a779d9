"""Endless plain English sentences for haystacks, from a small grammar without numerals.

Repeated filler makes needles stand out, and a model may know published texts by heart. Each sentence here makes sense
on its own, sentences share their words, and there are more than 10^9 of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trunkline.evaluate.seeded import SplitMix64

_LISTS = {
    "who": (
        "baker,carpenter,teacher,ferryman,gardener,librarian,miller,neighbour,painter,postman,shepherd,surveyor,tailor,"
        "watchmaker,widow,clerk,cook,doctor,farmer,fisherman,guide,innkeeper,joiner,mason,nurse,pilot,potter,sailor,"
        "student,weaver,mayor,glazier,beekeeper,harbour master,bell ringer,night porter"
    ),
    "how": (
        "old,young,patient,tired,cheerful,silent,careful,curious,stubborn,kind,clever,nervous,proud,quiet,friendly,"
        "absent-minded,tall,lame,thrifty,thoughtful"
    ),
    "thing": (
        "basket,ladder,lantern,kettle,violin,map,letter,blanket,bicycle,clock,bucket,hammer,mirror,notebook,umbrella,"
        "rope,chair,barrel,suitcase,wheelbarrow,window frame,coat,drum,oar,parcel,sack of flour,telescope,tin box,"
        "wooden spoon,cart,loaf of bread,jar of honey,brass key ring,pair of boots"
    ),
    "like": (
        "heavy,broken,borrowed,new,painted,rusty,narrow,plain,precious,forgotten,empty,worn,polished,leaking,crooked,"
        "mended,dusty,foreign,cheap,handsome"
    ),
    "did": (
        "carried,repaired,sold,found,hid,cleaned,traded,measured,painted,wrapped,lost,lifted,returned,examined,bought,"
        "unpacked,sketched,forgot,admired,stored"
    ),
    "place": (
        "bridge,market,mill,orchard,station,church,river,schoolhouse,quarry,lighthouse,barn,inn,well,town hall,canal,"
        "boathouse,vineyard,crossroads,pond,old wall,workshop,chapel,ferry landing,tannery,meadow,granary"
    ),
    "near": (
        "behind,beside,near,in front of,not far from,opposite,on the way to,downhill from,just past,within sight of"
    ),
    "when": (
        "in the morning,before noon,after supper,at dusk,in early spring,on a windy day,late in autumn,after the rain,"
        "during the harvest,on market day,before sunrise,in the first frost,at the end of the week,on the longest day,"
        "when the fog had lifted,while the bells were ringing,as soon as the road was dry,the day after the fair"
    ),
    "sky": (
        "The wind turned to the north,It rained without a break,Snow lay on the roofs,The river rose a little,The sun "
        "came out for an hour,Thunder rolled over the hills,The ice on the pond held,A thin mist stayed in the valley,"
        "The evening was unusually warm,Dust hung over the road"
    ),
    "talk": (
        "the price of wool,the new road,a lost dog,the coming election,the taste of last year's cider,the best way to "
        "prune a pear tree,a wedding in the next village,the depth of the well,how the flood had come,whether the roof "
        "would last,the noise of the saw mill,the names of the stars"
    ),
    "felt": (
        "was glad,was sorry,seemed surprised,did not mind,took offence,laughed,said nothing,shook hands,went home"
    ),
    "had_once": "danced,got lost,fallen asleep,lived,sung all night,seen a wolf,kept bees,found a coin",
    "beast": "dog,horse,goat,cat,heron,donkey,crow,hen,cow,swan,hedgehog,owl",
    "moves": "slept,waited,wandered about,stood still,looked for food,hid,made a noise,drank,was seen again",
}
_WORDS = {slot: words.split(",") for slot, words in _LISTS.items()}
_FORMS = (
    "The {how} {who} {did} the {like} {thing} {near} the {place}.",
    "The {who} {did} a {like} {thing} {when}.",
    "The {how} {who} and the {who} talked about {talk} {when}.",
    "{sky}, and the {who} {felt}.",
    "{sky}, so the {like} {thing} stayed {near} the {place}.",
    "Nobody knew why the {who} {did} the {thing}, but the {how} {who} {felt}.",
    "The {beast} of the {who} {moves} {near} the {place} {when}.",
    "The {place} belonged to the {who}, who {did} the {thing} every year {when}.",
    "There was a {like} {thing} {near} the {place}; the {who} {did} it {when}.",
    "Between the {place} and the {place} the {who} met the {who}, and they spoke of {talk}.",
    "Whoever passed the {place} {when} could see how the {beast} {moves}.",
    "A {how} {who} asked the {who} for a {like} {thing} and {felt}.",
    "The {thing} and the {thing} were {near} the {place} until the {who} {did} them {when}.",
    "It was said that the {who} had once {had_once} {near} the {place}.",
)
_PARTS = [re.split(r"\{(\w+)\}", form) for form in _FORMS]


def prose(draws: SplitMix64) -> Iterator[str]:
    """Yield endless made-up sentences, each with a leading space.

    Args:
        draws: generator of the sentences.
    """
    while True:
        words = [draws.choice(_WORDS[part]) if i % 2 else part for i, part in enumerate(draws.choice(_PARTS))]
        yield " " + re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", "".join(words))
