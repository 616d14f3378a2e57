"""The words the skills play with."""


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


THINGS = words(
    """apple pear plum fig lemon bread milk tea salt rice key lamp book pen desk chair door window wall roof red green
    blue black white cat dog horse bird fish table row index view column file page lock thread list tuple string number
    river stone tree leaf cloud rain snow sun moon star king queen ship train road bridge north south east west one two"""
)
NAMES = words("Ann Bob Carl Dora Eva Finn Greta Hans Ida Jan Kim Lea Max Nina Otto Paul Rosa Sam Tom Uma Vera Will Zoe Alice")
CITIES = words(
    """Paris Rome Berlin Oslo Lima Cairo Tokyo Delhi Quito Vienna Madrid Lisbon Athens Dublin Prague Warsaw Bern Seoul"""
)
VERBS = words("""get find list read send make open check fetch count show set add start stop search update delete book call""")
FIELDS = words(
    """name city age color size id title path date user price level host port table query unit count topic language"""
)
