"""Known relations between units, with their sources, to name what a measured ratio may be."""

NEAR = 0.03  # of a factor within which a measured ratio may be it

FACTORS: dict[str, float] = {
    "creatinine in µmol/l and mg/dl": 88.42,
    "glucose in mg/dl and mmol/l": 18.02,
    "cholesterol in mg/dl and mmol/l": 38.67,
    "triglycerides in mg/dl and mmol/l": 88.57,
    "urea nitrogen in mg/dl and mmol/l": 2.801,
    "bilirubin in µmol/l and mg/dl": 17.1,
    "calcium in mg/dl and mmol/l": 4.008,
    "inches and centimetres": 2.54,
    "feet and metres": 3.2808,
    "pounds and kilograms": 2.2046,
    "ounces and grams": 28.35,
    "mm Hg and kPa": 7.5006,
    "kilocalories and kilojoules": 4.184,
    "months and years": 12.0,
    "weeks and years": 52.18,
    "days and weeks": 7.0,
    "days and months": 30.44,
    "days and years": 365.25,
    "hours and days": 24.0,
    "minutes and hours": 60.0,
    "shares and per cent": 100.0,
    "thousands": 1000.0,
    "millions": 1e6,
}
"""Molar masses in g/mol: creatinine 113.12, glucose 180.16, cholesterol 386.65, triglycerides (triolein) 885.4,
bilirubin 584.66, calcium 40.078, urea nitrogen 28.013 (PubChem); lengths, masses and pressures as in NIST SP 811."""

FAHRENHEIT = (5.0 / 9.0, -160.0 / 9.0), (9.0 / 5.0, 32.0)
FAHRENHEIT_MISS = 3.0  # degrees by which the offset may be missed


def near_factors(ratio: float, offset: float = 0.0) -> str:
    """Which known relation a measured one may be; "" for none.

    Args:
        ratio: mine is ratio × theirs + offset.
        offset: the same.

    Example:
        >>> near_factors(1 / 88.0)
        'as between creatinine in µmol/l and mg/dl, triglycerides in mg/dl and mmol/l'
        >>> near_factors(0.55, -17.5)
        'as between °F and °C'
    """
    if offset:
        for slope, start in FAHRENHEIT:
            if abs(ratio / slope - 1.0) < 5 * NEAR and abs(offset - start) < FAHRENHEIT_MISS * max(1.0, slope) * 3:
                return "as between °F and °C"
        return ""
    size = max(ratio, 1.0 / ratio) if ratio > 0 else 0.0
    found = [name for name, factor in FACTORS.items() if abs(size / factor - 1.0) < NEAR]
    return f"as between {', '.join(found)}" if found else ""
