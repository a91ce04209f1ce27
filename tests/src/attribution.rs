//! Whose the bytes of a binary are: its symbol table, summed by crate.

use std::collections::BTreeMap;
use std::path::Path;

use object::{Object, ObjectSection, ObjectSymbol, SectionKind, SymbolKind};

/// Bytes of code and constants by crate, largest first, and what no symbol covers.
pub fn by_crate(file: &Path) -> Result<Vec<(String, u64)>, String> {
    let bytes = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let elf = object::File::parse(&*bytes).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut sizes: BTreeMap<String, u64> = BTreeMap::new();
    let mut covered = 0;
    // Functions that the linker has folded into one stand at the same address: counted once.
    let mut symbols: Vec<_> = elf
        .symbols()
        .filter(|symbol| matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Data) && symbol.size() > 0)
        .collect();
    symbols.sort_by_key(|symbol| symbol.address());
    symbols.dedup_by_key(|symbol| symbol.address());
    for symbol in symbols {
        let name = symbol.name().unwrap_or_default();
        *sizes.entry(crate_of(name)).or_default() += symbol.size();
        covered += symbol.size();
    }
    if covered == 0 {
        return Err(format!("{}: it has no symbols", file.display()));
    }
    let loaded: u64 = elf
        .sections()
        .filter(|section| {
            matches!(
                section.kind(),
                SectionKind::Text
                    | SectionKind::Data
                    | SectionKind::ReadOnlyData
                    | SectionKind::ReadOnlyString
            )
        })
        .map(|section| section.size())
        .sum();
    sizes.insert(
        "(constants, tables and unwinding without a symbol)".to_owned(),
        loaded.saturating_sub(covered),
    );
    let mut sizes: Vec<_> = sizes.into_iter().collect();
    sizes.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    Ok(sizes)
}

/// The crate that a symbol's path begins with; for an implementation the crate of its type.
fn crate_of(symbol: &str) -> String {
    let Ok(demangled) = rustc_demangle::try_demangle(symbol) else { return "(C and assembly)".to_owned() };
    let path = format!("{demangled:#}");
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let start = path.trim_start_matches(|c: char| !is_word(c));
    let start = ["dyn ", "mut ", "const "].iter().fold(start, |path, word| path.trim_start_matches(word));
    let name: String = start.chars().take_while(|c| is_word(*c)).collect();
    if start[name.len()..].starts_with("::") { name } else { "core".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_belongs_to_the_crate_of_its_path() {
        for (symbol, expected) in [
            ("_ZN4core3fmt9Formatter3pad17h0123456789abcdefE", "core"),
            ("_ZN52_$LT$rustls..Error$u20$as$u20$core..fmt..Display$GT$3fmt17h0123456789abcdefE", "rustls"),
            ("_RNvCs1234_7mycrate3foo", "mycrate"),
            ("_ZN4core3ptr42drop_in_place$LT$alloc..string..String$GT$17h0123456789abcdefE", "core"),
            ("memcpy", "(C and assembly)"),
        ] {
            assert_eq!(crate_of(symbol), expected, "{symbol}");
        }
    }

    #[test]
    fn what_is_no_binary_is_named() {
        let error = by_crate(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml").as_path()).unwrap_err();
        assert!(error.contains("Cargo.toml"), "{error}");
    }
}
