//! Values as the reference reads them from flags and environment: Go's own syntaxes.

use std::time::Duration;

/// Go's `strconv.ParseBool`.
pub fn parse_bool(word: &str) -> Result<bool, String> {
    match word {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err(format!("{word:?} is not a boolean")),
    }
}

/// Go's `strconv.ParseInt` with base 0: prefixes `0x`, `0o`, `0b`, a leading `0` for octal, and underscores between
/// digits or after the prefix.
pub fn parse_int(word: &str) -> Result<i64, String> {
    let bad = || format!("{word:?} is not a whole number");
    let (negative, unsigned) = match word.as_bytes().first() {
        Some(b'-') => (true, &word[1..]),
        Some(b'+') => (false, &word[1..]),
        _ => (false, word),
    };
    let lower = unsigned.to_ascii_lowercase();
    let (base, digits, prefixed) = if let Some(rest) = lower.strip_prefix("0x") {
        (16, rest, true)
    } else if let Some(rest) = lower.strip_prefix("0o") {
        (8, rest, true)
    } else if let Some(rest) = lower.strip_prefix("0b") {
        (2, rest, true)
    } else if lower.len() > 1 && lower.starts_with('0') {
        (8, &lower[1..], true)
    } else {
        (10, lower.as_str(), false)
    };
    let misplaced = digits.ends_with('_') || digits.contains("__") || (digits.starts_with('_') && !prefixed);
    if digits.is_empty() || misplaced || digits.starts_with(['+', '-']) {
        return Err(bad());
    }
    let plain: String = digits.chars().filter(|c| *c != '_').collect();
    let value = i128::from_str_radix(&plain, base).map_err(|_| bad())?;
    i64::try_from(if negative { -value } else { value }).map_err(|_| bad())
}

/// Go's `time.ParseDuration`, without negative durations: no option of ours has a use for one.
pub fn parse_duration(word: &str) -> Result<Duration, String> {
    let bad = || format!("{word:?} is not a duration: write it like 30s, 1m30s or 500ms");
    let unsigned = word.strip_prefix('+').unwrap_or(word);
    if unsigned == "0" {
        return Ok(Duration::ZERO);
    }
    if unsigned.is_empty() {
        return Err(bad());
    }
    let mut nanos: f64 = 0.0;
    let mut rest = unsigned;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let number: f64 = rest[..end].parse().map_err(|_| bad())?;
        rest = &rest[end..];
        let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let unit = match &rest[..end] {
            "ns" => 1.0,
            "us" | "\u{b5}s" | "\u{3bc}s" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            "m" => 6e10,
            "h" => 3.6e12,
            _ => return Err(bad()),
        };
        nanos += number * unit;
        rest = &rest[end..];
    }
    // Go's durations are 64-bit nanoseconds.
    if nanos >= 9.223_372_036_854_775e18 { Err(bad()) } else { Ok(Duration::from_secs_f64(nanos / 1e9)) }
}

/// A list variable: split at commas, each element trimmed; an empty variable is a list with one empty element.
pub fn env_list(value: &str) -> Vec<String> {
    value.split(',').map(|element| element.trim().to_owned()).collect()
}

/// One use of a list flag: a line of CSV, not trimmed.
pub fn flag_list(value: &str) -> Result<Vec<String>, String> {
    let mut out = Vec::new();
    if value.is_empty() {
        return Ok(out);
    }
    let mut rest = value;
    loop {
        if let Some(quoted) = rest.strip_prefix('"') {
            let mut element = String::new();
            let mut tail = quoted;
            loop {
                let end = tail.find('"').ok_or_else(|| format!("{value:?} has an unclosed quote"))?;
                element.push_str(&tail[..end]);
                tail = &tail[end + 1..];
                match tail.strip_prefix('"') {
                    Some(next) => {
                        element.push('"');
                        tail = next;
                    }
                    None => break,
                }
            }
            out.push(element);
            match tail.strip_prefix(',') {
                Some(next) => rest = next,
                None if tail.is_empty() => return Ok(out),
                None => return Err(format!("{value:?} has text after a quoted element")),
            }
        } else {
            let (element, next) = rest.split_once(',').map_or((rest, None), |(a, b)| (a, Some(b)));
            if element.contains('"') {
                return Err(format!("{value:?} has a quote inside an element"));
            }
            out.push(element.to_owned());
            match next {
                Some(next) => rest = next,
                None => return Ok(out),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn booleans() {
        assert!(parse_bool("T").unwrap() && parse_bool("1").unwrap() && !parse_bool("False").unwrap());
        for bad in ["", "yes", "tRUE", " true"] {
            assert!(parse_bool(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn integers() {
        for (word, value) in [
            ("0", 0),
            ("10", 10),
            ("-1", -1),
            ("+5", 5),
            ("0x1F", 31),
            ("0b101", 5),
            ("0o17", 15),
            ("017", 15),
        ] {
            assert_eq!(parse_int(word), Ok(value), "{word}");
        }
        assert_eq!(parse_int("1_000"), Ok(1000));
        assert_eq!(parse_int("0x_ff"), Ok(255));
        assert_eq!(parse_int("0_7"), Ok(7));
        for bad in
            ["", "-", "1_", "_1", "1__0", "08", "0x", "1.5", "a", "9223372036854775808", "--1", "0x-1", "ä"]
        {
            assert!(parse_int(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        assert_eq!(parse_duration("1h20m10s"), Ok(Duration::from_secs(4810)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        for bad in ["", "5", "s", "1d", "-1s", "1s ", ".", "..s", "99999999999999h"] {
            assert!(parse_duration(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn lists() {
        assert_eq!(env_list(" a , b"), ["a", "b"]);
        assert_eq!(env_list(""), [""]);
        assert_eq!(flag_list("a, b").unwrap(), ["a", " b"]);
        assert_eq!(flag_list("\"a,b\",c").unwrap(), ["a,b", "c"]);
        assert_eq!(flag_list("\"a\"\"b\"").unwrap(), ["a\"b"]);
        assert!(flag_list("").unwrap().is_empty());
        assert!(flag_list("\"a").is_err());
        assert!(flag_list("a\"b").is_err());
    }
}
