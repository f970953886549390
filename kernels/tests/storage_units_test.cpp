// Pure parts: checksum, JSON, layout, footers, index. No files.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <unordered_map>

#include "common/crc32c.h"
#include "common/json.h"
#include "common/schema.h"
#include "storage/record.h"
#include "storage/row_index.h"
#include "storage/segment_format.h"
#include "tests/faulty_env.h"

namespace kstep {
namespace {

TEST(Crc32c, MatchesThePublishedCheckValue) { EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u); }

TEST(Schema, LaysFieldsOutInOrderAndRefusesBadOnes) {
  RecordSchema schema;
  ASSERT_TRUE(RecordSchema::make({{"weight", DType::F32, 5}, {"tag", DType::U8, 3}, {"step", DType::I64, 1}}, &schema).ok());
  EXPECT_EQ(schema.offset_of("weight"), 0u);
  EXPECT_EQ(schema.offset_of("tag"), 20u);
  EXPECT_EQ(schema.offset_of("step"), 24u);
  EXPECT_EQ(schema.payload_bytes(), 32u);
  EXPECT_EQ(schema.stride_bytes(), 32u);
  EXPECT_EQ(schema.offset_of("m"), RecordSchema::kNoField);
  RecordSchema unused;
  EXPECT_EQ(RecordSchema::make({}, &unused).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(RecordSchema::make({{"m", DType::F32, 4}}, &unused).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(RecordSchema::make({{"weight", DType::F32, 0}}, &unused).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(RecordSchema::make({{"weight", DType::F32, 4}, {"weight", DType::F32, 4}}, &unused).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(RecordSchema::make({{"weight", DType::F32, 1u << 30}}, &unused).kind, StatusKind::InvalidArgument);
}

TEST(Layout, WastesAtMost15PercentForEveryDim) {
  for (std::uint32_t states = 1; states <= 4; ++states) {
    for (std::uint32_t extra : {0u, 4u, 12u}) {
      for (std::uint32_t dim = 1; dim <= 2048; ++dim) {
        const RecordLayout layout = RecordLayout::for_payload(states * dim * 4 + extra, 64u << 20);
        const double used = static_cast<double>(layout.records_per_unit) * layout.record_bytes;
        ASSERT_GE(layout.records_per_unit, 1u);
        ASSERT_EQ(layout.unit_bytes % kPageBytes, 0u);
        ASSERT_LE(layout.unit_bytes - used, kMaxUnitWaste * layout.unit_bytes) << "dim " << dim << " states " << states;
        ASSERT_LE(layout.unit_bytes, 256u << 10);
        const std::uint32_t last = layout.records_per_unit - 1;  // no record crosses a unit
        ASSERT_LE(layout.offset_of(last) + layout.record_bytes, kSegmentHeaderBytes + layout.unit_bytes);
      }
    }
  }
}

TEST(Json, KeepsEveryValueAndRefusesADamagedText) {
  Json json = Json::object();
  json.set("text", Json::string("a\"b\\c\nd\x01"));
  json.set("big", Json::number(std::uint64_t{UINT64_MAX}));
  json.set("real", Json::number(0.1));
  Json list = Json::array();
  list.push(Json::number(std::uint64_t{1}));
  list.push(Json::object());
  json.set("list", std::move(list));
  const std::string text = json.dump_checked();
  Json back;
  ASSERT_TRUE(Json::parse_checked("file", text, &back).ok());
  std::string s;
  std::uint64_t big = 0;
  double real = 0;
  ASSERT_TRUE(back.get_string("text", &s).ok());
  EXPECT_EQ(s, "a\"b\\c\nd\x01");
  ASSERT_TRUE(back.get_u64("big", &big).ok());
  EXPECT_EQ(big, UINT64_MAX);
  ASSERT_TRUE(back.get_double("real", &real).ok());
  EXPECT_EQ(real, 0.1);
  EXPECT_EQ(back.get_u64("absent", &big).kind, StatusKind::Corruption);
  EXPECT_EQ(back.get_u64("real", &big).kind, StatusKind::Corruption);
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] ^= 1;
    Json unused;
    EXPECT_EQ(Json::parse_checked("file", damaged, &unused).kind, StatusKind::Corruption) << "byte " << i;
    EXPECT_EQ(Json::parse_checked("file", text.substr(0, i), &unused).kind, StatusKind::Corruption) << "cut at " << i;
  }
}

TEST(Footer, GivesBackEveryEntry) {
  std::mt19937_64 rng(1);
  FaultyEnv env;
  std::unique_ptr<File> file;
  ASSERT_TRUE(env.open("/f", OpenMode::Create, false, &file).ok());
  std::vector<RecordTail> tails;
  FooterBuilder builder;
  for (int i = 0; i < 5000; ++i) {
    tails.push_back({rng() >> (rng() % 64), static_cast<std::uint32_t>(rng() >> 44), static_cast<std::uint32_t>(rng() >> (32 + rng() % 32))});
    builder.add(tails.back());
  }
  SegmentTrailer trailer;
  const AlignedBuffer footer = builder.finish(77, static_cast<std::uint32_t>(tails.size()), 3, &trailer);
  std::vector<std::byte> body(kSegmentHeaderBytes + kPageBytes);
  ASSERT_TRUE(file->write_at(0, body.data(), body.size()).ok());
  ASSERT_TRUE(file->write_at(body.size(), footer.data(), footer.size()).ok());
  FooterReader reader;
  ASSERT_TRUE(reader.open(file.get()).ok());
  RecordTail tail;
  for (const RecordTail& expected : tails) {
    ASSERT_TRUE(reader.next(&tail));
    ASSERT_EQ(tail.row_id, expected.row_id);
    ASSERT_EQ(tail.table_id, expected.table_id);
    ASSERT_EQ(tail.epoch, expected.epoch);
  }
  EXPECT_FALSE(reader.next(&tail));
  EXPECT_TRUE(reader.finished());
  env.damage("/f", body.size() + 100);
  EXPECT_EQ(reader.open(file.get()).kind, StatusKind::Corruption);
}

TEST(RowIndex, EqualsAMapForSparseAndDenseChunks) {
  for (const std::uint64_t num_rows : {std::uint64_t{100}, std::uint64_t{70000}, std::uint64_t{1} << 40 >> 12}) {
    RowIndex index(num_rows);
    std::unordered_map<std::uint64_t, std::uint32_t> model;
    std::mt19937_64 rng(num_rows);
    for (int i = 0; i < 200000; ++i) {
      const std::uint64_t row = rng() % (i % 3 == 0 ? num_rows : std::min<std::uint64_t>(num_rows, 66000));
      const auto slot = static_cast<std::uint32_t>(rng() % kNoSlot);
      const auto it = model.find(row);
      ASSERT_EQ(index.exchange(row, slot), it == model.end() ? kNoSlot : it->second);
      model[row] = slot;
    }
    EXPECT_EQ(index.num_materialised(), model.size());
    std::size_t num_visited = 0;
    index.for_each([&](std::uint64_t row, std::uint32_t slot) {
      ++num_visited;
      ASSERT_EQ(model.at(row), slot);
    });
    EXPECT_EQ(num_visited, model.size());
    for (std::uint64_t row = 0; row < std::min<std::uint64_t>(num_rows, 1000); ++row) {
      ASSERT_EQ(index.find(row), model.count(row) > 0 ? model[row] : kNoSlot);
    }
  }
}

TEST(RowIndex, AnUntouchedBillionRowsCostLittleAndAMillionTouchedOnesTheirShare) {
  RowIndex index(1'000'000'000);
  EXPECT_LT(index.memory_bytes(), 1u << 20);
  std::mt19937_64 rng(5);
  for (int i = 0; i < 1'000'000; ++i) index.exchange(rng() % 1'000'000'000, 1);
  EXPECT_LT(index.memory_bytes(), index.num_materialised() * 20);
  RowIndex dense(1'000'000);
  for (std::uint64_t row = 0; row < 1'000'000; ++row) dense.exchange(row, 1);
  EXPECT_LT(dense.memory_bytes(), 1'000'000u * 5);
}

}  // namespace
}  // namespace kstep
